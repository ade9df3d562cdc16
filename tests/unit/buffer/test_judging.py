"""Filters that empty or change what they are given: every one is told so, and the groups stay as they were."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.contract_scene import fill, indices
from slime_rl.buffer.filters import drop_reason, filter_samples
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.types import Group, Sample

CHANGES: list[tuple[Callable[[list[Sample]], Any], str]] = [
    (lambda group: group.clear(), "left 0 of 2 samples in the list that it was given"),
    (lambda group: group.pop(), "left 1 of 2 samples in the list"),
    (lambda group: group.append(group[0]), "left 3 of 2 samples in the list"),
    (lambda group: group.reverse(), "put other samples, or the samples in another order, into the list"),
    (lambda group: group.__setitem__(0, copy.copy(group[0])), "put other samples"),
    (lambda group: setattr(group[1], "reward", 7.5), "changed 'reward' from 0.3 to 7.5 of sample 3"),
    (lambda group: setattr(group[1], "reward", None), "changed 'reward' from 0.3 to None of sample 3"),
    (
        lambda group: group[0].tokens.pop(),
        r"changed 'tokens' \(\d entries before, \d after, not the same\) of sample 2",
    ),
    (lambda group: group[0].loss_mask.__setitem__(0, 0), "changed 'loss_mask'"),
    (lambda group: group[0].rollout_log_probs.__setitem__(0, -9.0), "changed 'rollout_log_probs'"),
    (lambda group: group[0].weight_versions.clear(), "changed 'weight_versions'"),
    (lambda group: setattr(group[0], "tokens", None), "changed 'tokens'"),
    (lambda group: group[0].clear_response(), "changed 'tokens'"),
    (lambda group: group[0].metadata.update(seen=1), "changed 'metadata'"),
    (lambda group: group[0].metadata["inner"]["list"].append(1), "changed 'metadata'"),
    (lambda group: group[0].metadata["array"].fill(0), "changed 'metadata'"),
    (
        lambda group: setattr(group[0], "remove_sample", True),
        r"changed 'remove_sample' \(set to True, which means not",
    ),
    (lambda group: delattr(group[0], "response"), r"changed 'response' \(deleted\)"),
]


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    data = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 9)), "--no-shuffle")
    config = make_config(tmp_path, "--n-samples-per-prompt", "2", *data, *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def filled(buffer: LedgerBuffer, count: int, own_objects: bool = False) -> list[Group]:
    groups = [fill(group) for group in buffer.reserve(count)]
    for sample in (sample for group in groups for sample in group.samples):
        sample.metadata = {"inner": {"list": []}, "array": np.ones(2), "nan": float("nan")}
        sample.reward_info = {"own": threading.Event} if own_objects else {}
    return groups


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[str(i) for i in range(len(CHANGES))])
@pytest.mark.parametrize("which", ["dynamic", "sample"])
def test_a_filter_that_changes_a_group_is_named_with_what_it_did(
    tmp_path: Path, change: Callable[[list[Sample]], Any], message: str, which: str
) -> None:
    config = make_config(tmp_path, f"--{which}-filter-path", "my.filters:f")
    group = filled(make_buffer(tmp_path), 2, own_objects=True)[1]
    before = repr(group)

    def changes(config: Config, samples: list[Sample]) -> None:
        change(samples)

    ask = drop_reason if which == "dynamic" else filter_samples
    with pytest.raises(ValueError, match=f"--{which}-filter-path my.filters:f {message}.*, for group 1; a filter says"):
        ask(config, changes, group)
    assert repr(group) == before
    judged: list[Sample] = []

    def looks(config: Config, samples: list[Sample]) -> None:
        judged.extend(samples)

    ask(config, looks, group)
    assert repr(judged) == repr(group.samples)


CHANGE: list[Callable[[list[Group]], Any]] = []


def as_told(config: Config, step: int, groups: list[Group], num_groups: int) -> Any:
    answer = CHANGE[0](groups)
    return groups[:num_groups] if answer is None else answer


POLICIES: list[tuple[Callable[[list[Group]], Any], str]] = [
    *((lambda groups, change=change: change(groups[1].samples), message) for change, message in CHANGES),
    (lambda groups: setattr(groups[1], "samples", []), "left 0 of 2 samples"),
    (lambda groups: setattr(groups[1], "attempts", 9), "changed 'attempts' from 0 to 9"),
    (lambda groups: groups[1].left_out.update(x=1), "changed 'left_out'"),
    (lambda groups: groups[1].leave_out({0: "bad"}), "changed 'left_out'"),
]


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize(("change", "message"), POLICIES, ids=[str(i) for i in range(len(POLICIES))])
def test_a_policy_that_changes_a_group_is_named_wherever_the_group_is(
    tmp_path: Path, change: Callable[[list[Group]], Any], message: str, place: str
) -> None:
    flags = ("--buffer-filter-path", f"{__name__}:as_told")
    buffer = make_buffer(tmp_path, *flags)
    groups = filled(buffer, 3)
    for group in groups:
        buffer.admit(group)
    if place == "file":
        buffer.offload()
    before = [repr(group) for group in buffer.payloads.get_many(range(3))]
    CHANGE[:] = [lambda given: change(given) and None]
    wanted = f"--buffer-filter-path {__name__}:as_told {message}.*for group 1, for step 0; a filter says"
    with pytest.raises(ValueError, match=wanted):
        buffer.take(0, 2)
    assert len(buffer) == 3
    CHANGE[:] = [lambda given: given.sort(key=lambda group: -group.group_index)]  # its own list is its own affair
    taken = buffer.take(0, 2)
    assert indices(taken) == [2, 1] and [repr(group) for group in taken] == [before[2], before[1]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda groups: [dataclasses.replace(groups[0], samples=groups[0].samples[:1]), groups[1]],
            r"not given: \[0\]",
        ),
        (lambda groups: copy.deepcopy(groups[:2]), r"not given: \[0, 1\]"),
        (lambda groups: groups.clear(), "returned 0 groups for step 0, which trains on 2"),
        (lambda groups: tuple(groups), "must return a list of groups, got tuple"),
    ],
)
def test_a_policy_returns_the_very_groups_that_it_was_given(
    tmp_path: Path, answer: Callable[[list[Group]], Any], message: str
) -> None:
    buffer = make_buffer(tmp_path, "--buffer-filter-path", f"{__name__}:as_told")
    for group in buffer.reserve(3):
        buffer.admit(fill(group))
    CHANGE[:] = [answer]
    with pytest.raises(ValueError, match=message):
        buffer.take(0, 2)
    assert len(buffer) == 3
