"""Random lives of a buffer with everything switched on: a prompt trains once an epoch, or is dropped and counted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import fill, through_disk
from slime_rl.buffer.ledger import State
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.types import Group, Prompt

BATCH, STEPS = 3, 14


def hardest_last(config: Config, epoch: int, rows: list[int], prompt_of: Callable[[int], Prompt]) -> list[int]:
    return sorted(rows, key=lambda row: (len(prompt_of(row).prompt), row))


def newest(config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]:
    return sorted(groups, key=lambda group: -group.group_index)[:num_groups]


def any_flags(tmp_path: Path, rng: random.Random) -> list[str]:
    """Several weighted files with bad rows, and a random choice of everything that the buffer can do."""
    for name in "ab":
        rows = [json.dumps({"prompt": name * rng.randint(1, 9), "label": "1"}) for _ in range(rng.randint(3, 7))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*rows, "oops", rows[0]]) + "\n")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    spec = rng.choice([f"{a},{b}@2", f"{a}@[1:]@0.5,{b}", f"{a}@[0:3],{a}@[2:]@1.5,{b}@0.4"])
    flags = ["--prompt-data", spec, "--bad-rows", "skip", "--check-rows", "2", "--rollout-batch-size", str(BATCH)]
    policies = ["oldest_first", "freshest_first", "stalest_first", "by_reward_variance", f"{__name__}:newest"]
    flags += ["--buffer-filter-path", rng.choice(policies), rng.choice(["--shuffle", "--no-shuffle"])]
    if rng.random() < 0.4:
        flags += ["--curriculum-path", f"{__name__}:hardest_last"]
    if rng.random() < 0.5:
        flags += ["--buffer-memory-bytes", rng.choice(["1", "6000", "20000"])]
    if rng.random() < 0.5:
        flags += ["--replay-groups", rng.choice(["1", "2"]), "--replay-max-uses", rng.choice(["1", "3"])]
        flags += ["--replay-pool-groups", rng.choice(["2", "8"])]
    return flags


class Life:
    """A run that trains, is saved, and forgets what it did after the save when it is killed."""

    def __init__(self, tmp_path: Path, rng: random.Random) -> None:
        self.tmp_path, self.rng, self.flags = tmp_path, rng, any_flags(tmp_path, rng)
        self.expires = rng.choice(["never", "drop", "requeue", "mask"])
        self.buffer, self.step, self.lives = self.open(), 0, 0
        self.trained: list[tuple[int, int, int]] = []
        self.given: dict[int, tuple[int, int]] = {}  # group -> epoch and row, as first reserved
        self.saved = self.snapshot()

    def open(self, *more: str) -> LedgerBuffer:
        config = make_config(self.tmp_path, *self.flags, "--n-samples-per-prompt", "2", *more)
        return LedgerBuffer(config, FilePromptSource(config))

    def snapshot(self) -> tuple[dict[str, Any], int, int]:
        return through_disk(self.buffer.state_dict()), self.step, len(self.trained)

    def kill(self) -> None:
        state, self.step, count = self.saved
        del self.trained[count:]
        if self.rng.random() < 0.7:  # else trainers are lost, and the same buffer goes back
            self.buffer.close()
            self.lives += 1
            self.buffer = self.open("--run-dir", str(self.tmp_path / f"run_{self.lives}"))
        self.buffer.load_state_dict(state)

    def produce(self, count: int) -> None:
        for group in self.buffer.reserve(count):
            key = (group.epoch, group.source_index)
            assert self.given.setdefault(group.group_index, key) == key
            chance = self.rng.random()
            if chance < 0.25:
                if self.rng.random() < 0.5:
                    self.sample(group)
                self.buffer.requeue(group)
            elif chance < 0.33:
                self.buffer.drop(group, "filtered")
            elif chance < 0.9:
                self.sample(group)
                self.buffer.admit(group)
            # else it is under way when something else happens, perhaps for ever

    def sample(self, group: Group) -> None:
        if any(sample.response_length for sample in group.samples):
            return  # a partial one that is whole now
        fill(group)
        for sample in group.samples:
            sample.weight_versions = [self.step] * sample.response_length
            sample.reward = self.rng.random()

    def train(self) -> None:
        if self.expires != "never":
            self.buffer.expire(self.step - 2, self.expires)  # type: ignore[arg-type]
        if len(self.buffer) < BATCH:
            return
        groups = self.buffer.take(self.step, BATCH)
        if self.rng.random() < 0.3:
            assert self.buffer.take(self.step, BATCH) == groups
        if self.rng.random() < 0.3:  # saved between take and commit: the step is not trained yet
            state, step, count = self.snapshot()
            self.saved = state, step, count
            promised = [group.group_index for group in groups]
            if self.rng.random() < 0.5:
                self.kill()
                assert [group.group_index for group in self.buffer.take(self.step, BATCH)] == promised
        self.trained += [(g.group_index, g.epoch, g.source_index) for g in groups if not g.replays]
        self.buffer.commit(self.step)
        self.step += 1


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life_with_kills_trains_each_prompt_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    life = Life(tmp_path, rng)
    for _ in range(4000):
        if life.step >= STEPS:
            break
        act = rng.random()
        if act < 0.5:
            life.produce(rng.randint(0, 5))
        elif act < 0.8:
            life.train()
        elif act < 0.88:
            life.saved = life.snapshot()
        elif act < 0.94:
            life.kill()
        else:
            rng.choice([life.buffer.offload, life.buffer.onload])()
    assert life.step == STEPS
    ledger, trained = life.buffer.ledger, life.trained
    groups = [group for group, _, _ in trained]
    assert len(set(groups)) == len(groups), life.flags
    assert {g for g in range(ledger.next_group_index) if ledger.state_of(g) is State.COMMITTED} == set(groups)
    order = life.open("--run-dir", str(tmp_path / "order")).source.next_prompts(ledger.next_group_index)
    wanted = {group: (epoch, prompt.source_index) for group, (epoch, prompt) in enumerate(order)}
    assert {group: (epoch, row) for group, epoch, row in trained}.items() <= wanted.items()
    counts = life.buffer.counts()
    under_way = ("waiting", "reserved", "generated", "admitted")
    assert sum(counts[name] for name in under_way) + counts["dropped"] + len(groups) == ledger.next_group_index
    drops = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    assert counts["dropped"] == drops
    kept = set(life.buffer.replay.groups())
    assert {g for g in range(ledger.next_group_index) if g in life.buffer.payloads} <= set(ledger.live()) | kept
    life.buffer.close()
    assert not list((tmp_path).glob("run*/buffer_spill/segment_*"))
