"""A tiny model and products that it cannot work out itself but a calculator can: for scripts/run_tool_use_cpu.sh.

    python tools/make_tool_task.py --output DIR [--seed N]

DIR/model          the quickstart's architecture and characters, with two words for the format of a tool call
DIR/sft.jsonl      the warm-up: DIRECT_SHARE of the products are answered with "?", the others with a tool call, and
                   every call's result is read out
DIR/train.jsonl    products for GRPO: {"prompt": "17*85=", "label": "1445"}
DIR/heldout.jsonl  200 products for evaluation; neither a*b nor b*a of them is in the other two files

After the warm-up the policy reaches for the calculator in about a third of its samples; reinforcement has to find out
that this is what pays.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.make_quickstart import CHARACTERS, EOS, PAD, START, UNKNOWN, split_sums, write_model  # noqa: E402

DIRECT_SHARE = 0.65
NO_IDEA = "?"  # one word, so that the warm-up spends itself on the format of calls and not on numbers without a pattern
CALL, CALL_END = '[calculator(expression="', '")]'
# Calls as SGLang's "pythonic" parser reads them. Roles are marked by one letter, as in the quickstart.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'][0] + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '[' if loop.first else ', ' }}{{ call['function']['name'] + '(' }}"
    "{% for name, value in call['function']['arguments'].items() %}"
    "{{ (', ' if not loop.first else '') + name + '=\"' + value + '\"' }}"
    "{% endfor %}"
    "{{ ')]' if loop.last else ')' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """One token a character, and one each for the beginning and the end of a call; returns the vocabulary's size."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys([*CHARACTERS, *'[]"_'])
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, START, UNKNOWN, *characters, CALL, CALL_END])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words = r'\[calculator\(expression="|"\)\]|[\s\S]'
    core.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return len(vocabulary)


def warmup_rows(pairs: list[tuple[int, int]], seed: int) -> list[dict[str, Any]]:
    """Two rows for each product: no idea or the call, and the reading of the call's result."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        question, product = f"{a}*{b}=", str(a * b)
        call = {"id": "call00000", "type": "function"}
        call["function"] = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}  # type: ignore[assignment]
        conversation = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": "calculator", "content": product},
        ]
        if rng.random() < DIRECT_SHARE:
            rows.append({"prompt": question, "label": NO_IDEA})
        else:
            rows.append({"prompt": question, "label": f"{CALL}{a}*{b}{CALL_END}"})
        rows.append({"prompt": conversation, "label": product})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    folder = Path(args.output)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    train, heldout = split_sums(args.seed)
    write_jsonl(folder / "sft.jsonl", warmup_rows(train, args.seed))
    for name, pairs in (("train", train), ("heldout", heldout)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{a}*{b}=", "label": str(a * b)} for a, b in pairs])
    size = write_model(folder / "model", args.seed, write_tokenizer)
    print(f"{folder}: model with {size:,} parameters, {len(train)} training and {len(heldout)} held-out products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
