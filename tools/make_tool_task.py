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

import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.make_quickstart import (  # noqa: E402
    CHARACTERS,
    Vocabulary,
    parse_arguments,
    questions,
    split_sums,
    write_model,
    write_rows,
)

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
VOCABULARY = Vocabulary(CHARACTERS + '[]"_', (CALL, CALL_END), CHAT_TEMPLATE)


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


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(__doc__, argv)
    folder: Path = args.output
    train, heldout = split_sums(args.seed)
    size = write_model(folder / "model", args.seed, VOCABULARY)
    write_rows(folder / "sft.jsonl", warmup_rows(train, args.seed))
    for name, pairs in (("train", train), ("heldout", heldout)):
        write_rows(folder / f"{name}.jsonl", questions(pairs, "*"))
    print(f"{folder}: model with {size:,} parameters, {len(train)} training and {len(heldout)} held-out products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
