"""Prompts from the reasoning-gym package: a PromptSource without files, and a writer of held-out files.

    --data-source-path plugins.data.reasoning_gym_source:ReasoningGymSource
    --prompt-data "chain_sum?size=500&seed=1&min_terms=2&max_terms=2"
    --reward-function-path plugins.rewards.reasoning_gym:reward

    python -m plugins.data.reasoning_gym_source "chain_sum?size=64&seed=100000" --output heldout.jsonl \
        --without "chain_sum?size=500&seed=1"          # for --eval-prompt-data heldout heldout.jsonl

The package seeds entry i with `seed + i`: tasks with neighbouring seeds share entries. --without leaves those out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plugins.data.reasoning_gym_tasks import (
    TaskSpec,
    is_number,
    open_task,
    package_version,
    parse_task_spec,
    read_entry,
)
from slime_rl.buffer.sources import LocatedPrompt, check_prompt_lengths
from slime_rl.buffer.sources.order import epoch_order
from slime_rl.config import Config
from slime_rl.types import Prompt

METADATA_KEY = "reasoning_gym"  # what plugins.rewards.reasoning_gym reads


def prompt_text(entry: dict[str, Any]) -> str:
    """The question, asking for the bare answer: that keeps responses short and is what the verifiers compare."""
    kind = "number" if is_number(entry["answer"]) else "final answer"
    return f"{entry['question'].rstrip()}\nAnswer with just the {kind}."


def prompt_metadata(spec: TaskSpec, entry: dict[str, Any]) -> dict[str, Any]:
    """The task and the whole entry, which its verifier needs."""
    return {METADATA_KEY: {"task": spec.text, "entry": entry}}


class ReasoningGymSource:
    """The PromptSource over one task; entries are generated when they are asked for.

    The order is a function of seed and epoch alone; the state is a cursor and the task it points into. With
    --long-prompt skip, a prompt over --max-prompt-len is passed over in every epoch.
    """

    def __init__(self, config: Config) -> None:
        if config.data.prompt_data is None:
            raise ValueError("--prompt-data is needed: a reasoning-gym task such as 'chain_sum?size=500&seed=1'")
        self.config = config
        self.spec = parse_task_spec(config.data.prompt_data)
        self.dataset = open_task(self.spec)
        self._usable = np.ones(len(self.dataset), dtype=bool)
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def limit_lengths(self, encode: Callable[[Prompt], Sequence[int]]) -> None:
        """Apply --max-prompt-len and --long-prompt with `encode`; call it before prompts are drawn."""
        if (self._epoch, self._position) != (0, 0):
            raise ValueError("limit_lengths must be called before prompts are drawn")
        prompts = [self.get(index) for index in range(len(self.dataset))]
        limit, policy = self.config.sampling.max_prompt_len, self.config.data.long_prompt
        kept = [prompt.source_index for prompt in check_prompt_lengths(prompts, encode, limit, policy)]
        self._usable[:] = False
        self._usable[kept] = True
        self._order = self._order_of(0)

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """The next prompts as (epoch, prompt), going on to the next epoch when one ends."""
        drawn: list[tuple[int, Prompt]] = []
        while len(drawn) < num_prompts:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            drawn.append((self._epoch, self.get(int(self._order[self._position]))))
            self._position += 1
        return drawn

    def get(self, source_index: int) -> Prompt:
        """One prompt. Raises ValueError when the task has no such entry."""
        if not 0 <= source_index < len(self.dataset):
            raise ValueError(f"--prompt-data {self.spec.text}: there is no entry {source_index}")
        entry = read_entry(self.dataset, self.spec, source_index)
        return LocatedPrompt(
            source_index=source_index,
            prompt=prompt_text(entry),
            label=entry["answer"],
            metadata=prompt_metadata(self.spec, entry),
            origin=f"{self.spec.name}[{source_index}]",
        )

    def __len__(self) -> int:
        return len(self._order)

    def _order_of(self, epoch: int) -> np.ndarray:
        seed, shuffle = self.config.train.seed, self.config.data.shuffle
        order = epoch_order([len(self.dataset)], [1.0], seed, epoch, shuffle)
        return order[self._usable[order]]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the cursor and what it points into."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor.

        Raises:
            ValueError: the state belongs to another task, package version or order; names both values.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"--load: the checkpoint's prompts have {name} {state.get(name)!r}, this run has {value!r}; "
                    "prompts would be trained twice or never: resume with the same, or start without --load"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "task": self.spec.text,
            "reasoning_gym_version": package_version(),
            "seed": self.config.train.seed,
            "shuffle": self.config.data.shuffle,
            "usable": int(self._usable.sum()),
        }


def rows_of(spec: TaskSpec, excluded: Sequence[TaskSpec] = (), flag: str = "SPEC") -> list[dict[str, Any]]:
    """Rows for a jsonl file: every question of `spec` once, without those that an excluded task asks too.

    Raises:
        ValueError: a task that cannot be opened, or no question left.
    """
    seen: set[str] = set()
    for other in excluded:
        dataset = open_task(other, "--without")
        seen.update(dataset[index]["question"] for index in range(len(dataset)))
    dataset = open_task(spec, flag)
    rows: list[dict[str, Any]] = []
    for index in range(len(dataset)):
        entry = read_entry(dataset, spec, index)
        if entry["question"] not in seen:
            seen.add(entry["question"])
            metadata = prompt_metadata(spec, entry)
            rows.append({"prompt": prompt_text(entry), "label": entry["answer"], "metadata": metadata})
    if not rows:
        raise ValueError(f"{flag} {spec.text}: --without leaves no question of {len(dataset)}")
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write jsonl aside and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(aside, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="TASK?KEY=VALUE&...", help="the task to write")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="jsonl with prompt, label, metadata")
    parser.add_argument("--without", action="append", default=[], metavar="SPEC", help="leave its questions out")
    args = parser.parse_args(argv)
    try:
        spec = parse_task_spec(args.spec, "SPEC")
        rows = rows_of(spec, [parse_task_spec(text, "--without") for text in args.without])
    except ValueError as error:
        print(f"reasoning_gym_source: {error}", file=sys.stderr)
        return 2
    write_rows(args.output, rows)
    print(f"{args.output}: {len(rows)} prompts of {spec.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
