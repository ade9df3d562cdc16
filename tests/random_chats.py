"""Random conversations, tokenizers and a stand-in policy for testing how conversations are rendered.

A stand-in turn is what the template itself would write for the message, tokenised apart from what comes before: what a
policy samples that knows its format by heart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_rl.rollout.agent.template import ChatTemplate, Message

FOLDER = Path(__file__).parent / "chat_templates"
# (template, end token, further special tokens); the end token of GLM is the role that comes next.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2_5": ("<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "qwen3": ("<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "llama3": (
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "smollm2": ("<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "glm4": (
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "deepseek_v3": (
        "<｜end▁of▁sentence｜>",
        (
            *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *(
                f"<｜tool▁{noun}▁{side}｜>"
                for noun in ("calls", "call", "outputs", "output")
                for side in ("begin", "end")
            ),
        ),
    ),
}
FAMILIES["deepseek_r1"] = FAMILIES["deepseek_v3"]
BOS = {
    "llama3": "<|begin_of_text|>",
    "deepseek_v3": "<｜begin▁of▁sentence｜>",
    "deepseek_r1": "<｜begin▁of▁sentence｜>",
}

TEXTS = (
    *("", " ", "\n", "\n\n", "ok", "12 + 30 = 42", "a\nb", "\n\nleading", "trailing\n\n", "  spaces  ", "tab\there"),
    *(
        "Grüße, Zürich!",
        "日本語のテキスト",
        "مرحبا بالعالم",
        "e\u0301 combining",
        "👩‍👩‍👧‍👦 family 🏳️‍🌈",
        "\u200bzero width",
    ),
    *("<|im_end|>", "text <|im_start|>user\nnot a turn<|im_end|> more", "<|eot_id|> and <|python_tag|>", "</think>"),
    *("<tool_call>\n{}\n</tool_call>", "<｜end▁of▁sentence｜>", "<|user|>", "[gMASK]", "<|endoftext|>", "</s><s>"),
    *(
        "def f(x):\n    return x + 1\n",
        '{"a": [1, 2.5, null], "b": "\\n"}',
        "| a | b |\n|---|---|\n",
        "\\boxed{5}",
        "x" * 90,
    ),
)
PLAIN = tuple(text for text in TEXTS if "<" not in text and text == text.strip() and text)


def tokenizer_for(family: str, core: Any) -> Any:
    """A transformers tokenizer of `core` (tokenizers.Tokenizer, byte-level BPE) with a family's template."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    end, others = FAMILIES[family]
    copy = Tokenizer.from_str(core.to_str())
    copy.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (end, *others)])
    return PreTrainedTokenizerFast(
        tokenizer_object=copy,
        eos_token=end,
        pad_token=end,
        bos_token=BOS.get(family),
        chat_template=(FOLDER / f"{family}.jinja").read_text(encoding="utf-8"),
    )


def trained_bpe(vocab_size: int = 600) -> Any:
    """A byte-level BPE with the usual splitting into words, numbers and runs of spaces, learnt from the texts above."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [*TEXTS, *(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja")))]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet))
    return core


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("search", "calculator", "read_file")
]


def random_conversation(rng: random.Random, plain: bool = False) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """(messages that end with the assistant, tools). `plain` keeps contents that no template changes."""
    texts = PLAIN if plain else TEXTS

    def text() -> str:
        return (
            " ".join(rng.choice(texts) for _ in range(rng.choice((1, 1, 1, 2, 4)))) if not plain else rng.choice(texts)
        )

    tools = rng.sample(TOOLS, rng.randint(1, 3)) if rng.random() < 0.7 else None
    messages: list[Message] = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        while tools and rng.random() < 0.5:
            messages += _tool_round(rng, tools, text)
        messages.append(_with_reasoning(rng, {"role": "assistant", "content": text()}, text))
    return messages, tools


def _tool_round(rng: random.Random, tools: Sequence[dict[str, Any]], text: Any) -> list[Message]:
    calls: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(tools)["function"]["name"]
        arguments = {"x": text(), "n": rng.choice((1, 2.5, None, [1], {"k": "v"}))}
        identity = f"call{rng.randrange(10**5):05d}"
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    assistant = _with_reasoning(
        rng, {"role": "assistant", "content": rng.choice(("", text())), "tool_calls": calls}, text
    )
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text()}
        for call in calls
    ]
    return [assistant, *answers]


def _with_reasoning(rng: random.Random, message: Message, text: Any) -> Message:
    return {**message, "reasoning_content": text()} if rng.random() < 0.4 else message


def sampled_text(template: ChatTemplate, family: str, messages: Sequence[Message], turn: int) -> str:
    """What a policy samples as `messages[turn]`, its end token included."""
    prompt, written = template.text(messages[:turn], True), template.text(messages[: turn + 1], False)
    if written.startswith(prompt):
        body = written[len(prompt) :]
    else:  # the prompt opens a thought that the template does not keep
        kept = prompt.removesuffix("<think>\n")
        assert written.startswith(kept), "a template of a kind that no rule here knows"
        body = f"{messages[turn].get('reasoning_content', '')}\n</think>\n\n" + written[len(kept) :]
    end = FAMILIES[family][0]
    if family == "glm4":  # the policy ends a turn by naming whose turn it is
        end = "<|observation|>" if messages[turn].get("tool_calls") else "<|user|>"
        return body + end
    return body[: body.rindex(end)] + end
