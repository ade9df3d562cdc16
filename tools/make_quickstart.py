"""A tiny model and an arithmetic task, made in seconds without any download: what scripts/quickstart.sh trains on.

    python tools/make_quickstart.py --output DIR [--seed N]

DIR/model          Qwen3 architecture, random weights (hidden 64, 2 layers), a character tokenizer, a chat template
DIR/sft.jsonl      labelled rows for the warm-up: {"prompt": "17+85=", "label": "102"}
DIR/train.jsonl    prompts for GRPO, same keys
DIR/heldout.jsonl  200 sums for evaluation; neither a+b nor b+a of them is in the other two files
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_HELDOUT = 200
CHARACTERS = "0123456789+-*/=<>()?!.,: \n" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, EOS, START, UNKNOWN = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|unk|>"
# Roles are marked by one letter: every token of a prompt costs time on a small machine.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'][0] + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)


def split_sums(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(training pairs, held-out pairs) of two-digit numbers; a pair and its mirror image are on the same side."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    heldout = pairs[:NUM_HELDOUT]
    train = [pair for a, b in pairs[NUM_HELDOUT:] for pair in {(a, b), (b, a)}]
    return sorted(train), sorted(heldout)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def questions(pairs: list[tuple[int, int]], sign: str) -> list[dict[str, Any]]:
    """{"prompt": "17+85=", "label": "102"} of every pair; `sign` is + or *."""
    return [{"prompt": f"{a}{sign}{b}=", "label": str(a + b if sign == "+" else a * b)} for a, b in pairs]


@dataclass(frozen=True)
class Vocabulary:
    """One token a character, and one for each of some words; roles of messages as the template writes them."""

    characters: str = CHARACTERS
    words: tuple[str, ...] = ()
    chat_template: str = CHAT_TEMPLATE

    def write_tokenizer(self, folder: Path) -> int:
        """Save a tokenizer; returns its number of tokens."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens = dict.fromkeys([PAD, EOS, START, UNKNOWN, *self.characters, *self.words])
        core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
        pattern = "|".join([*map(re.escape, self.words), r"[\s\S]"])
        core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        core.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token=PAD,
            eos_token=EOS,
            unk_token=UNKNOWN,
            additional_special_tokens=[START],
            chat_template=self.chat_template,
        )
        tokenizer.save_pretrained(folder)
        return len(tokens)


def write_model(folder: Path, seed: int, vocabulary: Vocabulary) -> int:
    """A tokenizer and random weights in the Qwen3 architecture; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = vocabulary.write_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-vocab_size // 32) * 32,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,  # of this small width; the usual 0.02 learns several times slower
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def parse_arguments(description: str | None, argv: list[str] | None) -> argparse.Namespace:
    """`output` (a Path) and `seed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(__doc__, argv)
    folder: Path = args.output
    train, heldout = split_sums(args.seed)
    size = write_model(folder / "model", args.seed, Vocabulary())
    for name, pairs in (("sft", train), ("train", train), ("heldout", heldout)):
        write_rows(folder / f"{name}.jsonl", questions(pairs, "+"))
    print(f"{folder}: model with {size:,} parameters, {len(train)} training and {len(heldout)} held-out sums")
    return 0


if __name__ == "__main__":
    sys.exit(main())
