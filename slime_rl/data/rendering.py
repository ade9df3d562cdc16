"""Prompts as token ids: the tokenizer of the checkpoint and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_rl.config import Config

PART_OF_CHARACTER = "\ufffd"  # what tokenizers decode bytes to that are no whole character
MAX_TOKENS_OF_CHARACTER = 8  # of UTF-8 it is 4; a response of nothing but broken bytes must not take quadratic time


def load_tokenizer(config: Config) -> Any:
    """The tokenizer in --hf-checkpoint.

    Raises:
        ValueError: the folder holds none that transformers can load.
    """
    from transformers import AutoTokenizer  # heavy; only the processes that tokenise need it

    path = config.model.hf_checkpoint
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # a broken file makes transformers and tokenizers raise errors of every kind
        raise ValueError(
            f"--hf-checkpoint {path}: cannot load its tokenizer: {type(error).__name__}: {error}"
        ) from error


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it: joined, they are the text of all of them.

    A character of several tokens is its last token's; the others add nothing.
    """
    alone = {token: tokenizer.decode([token]) for token in set(tokens)}
    texts = [alone[token] for token in tokens]
    if "".join(texts) == tokenizer.decode(list(tokens)):
        return texts  # as nearly always; what follows takes two calls for each token
    texts = []
    start = end = 0  # the token before and the first that is not told yet: what a token adds depends on the one before
    for i in range(len(tokens)):
        before, now = tokenizer.decode(tokens[start:end]), tokenizer.decode(tokens[start : i + 1])
        is_part = now.endswith(PART_OF_CHARACTER) and i + 1 < len(tokens) and i - end < MAX_TOKENS_OF_CHARACTER
        if is_part:
            texts.append("")
            continue
        texts.append(now[len(before) :] if now.startswith(before) else tokenizer.decode(tokens[end : i + 1]))
        start, end = end, i + 1
    return texts


def render_prompt(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    apply_chat_template: bool,
    tools: list[dict[str, Any]] | None = None,
    template_options: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids `[P]` that generation starts from.

    With `apply_chat_template`, text becomes one user message, and a last message of the assistant is continued rather
    than followed by a new turn. Without it, text is encoded as it is, with the tokenizer's leading special tokens.

    Raises:
        ValueError: messages without a template, tools without a template, or a template that rejects the messages.
    """
    if apply_chat_template:
        return _render_messages(tokenizer, prompt, tools, template_options or {})
    if not isinstance(prompt, str):
        raise ValueError("--no-apply-chat-template needs text prompts, got chat messages")
    if tools:
        raise ValueError("--no-apply-chat-template leaves no place for the tools of a prompt")
    tokens = list(tokenizer.encode(prompt, add_special_tokens=True))
    # Some tokenizers end every text with EOS, which would tell the model that its answer is over.
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        plain = list(tokenizer.encode(prompt, add_special_tokens=False))
        if not plain or plain[-1] != tokenizer.eos_token_id:
            tokens.pop()
    return tokens


def _render_messages(
    tokenizer: Any, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; give it one, or "
            "pass --no-apply-chat-template"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    continues = messages[-1]["role"] == "assistant"
    try:
        tokens = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **options,
        )
    except Exception as error:  # templates raise their own kinds of errors
        raise ValueError(f"the chat template rejects this prompt: {type(error).__name__}: {error}") from error
    return list(tokens)
