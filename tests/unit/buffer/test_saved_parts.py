"""A saved buffer that is damaged, or made with other settings."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_config, write_prompts

from slime_rl.buffer.contract_scene import fill, through_disk
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.data.state_files import load_state, save_state

N = 2


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    data = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 50)), "--replay-groups", "1")
    config = make_config(tmp_path, "--n-samples-per-prompt", str(N), *data, *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def busy_buffer(tmp_path: Path) -> LedgerBuffer:
    """Groups in every state, one that has trained and may again, one that a step has taken."""
    buffer = make_buffer(tmp_path)
    groups = [fill(group) for group in buffer.reserve(8)]
    for group in groups[:5]:
        buffer.admit(group)
    buffer.requeue(groups[5])
    buffer.drop(groups[6], "bad")
    buffer.take(0, 2)
    buffer.commit(0)
    buffer.take(1, 2)
    return buffer


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a nested state."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in paths_of(item, (*at, key)))]


def holder(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        state = state[key]
    return state


WRONG: list[Any] = [None, "x", -7, 2.5, [], {}, [[3, 1]], torch.zeros(2)]


@pytest.mark.parametrize("seed", range(4))
def test_a_state_with_anything_missing_or_wrong_is_refused_by_its_part_or_loads(tmp_path: Path, seed: int) -> None:
    """Never an error of Python's own, and never a buffer whose account is not whole."""
    rng = random.Random(seed)
    state = busy_buffer(tmp_path).state_dict()
    for path in paths_of(state)[1:]:
        if rng.random() > 0.12:
            continue
        damaged = copy.deepcopy(state)
        if rng.random() < 0.4:
            del holder(damaged, path)[path[-1]]
        else:
            holder(damaged, path)[path[-1]] = rng.choice(WRONG)
        buffer = make_buffer(tmp_path)
        try:
            buffer.load_state_dict(damaged)
        except ValueError as error:
            text = str(error)
            assert text.startswith("--load: "), (path, text)
            if path[0] not in ("format", "source"):
                parts = (path[0], "payloads") if path[0] == "replay" else (path[0],)  # tokens of what the pool lost
                assert any(repr(part) in text for part in parts) and "damaged" in text, (path, text)
            continue
        assert path[0] in ("ledger", "replay", "source", "policies", "records", "promised", "payloads", "samples"), path
        buffer.take(1, 2)
        buffer.reserve(3)
        buffer.state_dict()
        counts = buffer.counts()
        whole = sum(counts[name] for name in ("waiting", "reserved", "generated", "admitted", "committed", "dropped"))
        assert whole == buffer.ledger.next_group_index, path


CASES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("ledger", lambda s: s.pop("ledger"), "it has no 'ledger'"),
    ("ledger", lambda s: s["ledger"].pop("live"), "it has no 'live'"),
    ("ledger", lambda s: s["ledger"]["live"].update(asleep=[[0, 1]]), "'asleep' is not a valid State"),
    ("ledger", lambda s: s["ledger"]["live"]["waiting"].append([0, 1]), "ranges must rise and not overlap"),
    ("ledger", lambda s: s["ledger"]["live"]["generated"].insert(0, [0, 1]), "group 0 is in two states"),
    ("ledger", lambda s: s["ledger"].update(dropped=[]), "group 6 is in no state"),
    ("ledger", lambda s: s["ledger"].update(next_group_index=9), "accounts for 8 groups, but 9 were opened"),
    ("records", lambda s: s.update(records=s["records"][1:]), "one entry for each group that is not done"),
    ("records", lambda s: s.update(records=[[0, 0, 0, 0]]), r"whole numbers \[groups, 4\], got list"),
    ("promised", lambda s: s.update(promised=[[1, [0]]]), r"step 1 had taken groups that are not generated: \[0\]"),
    ("replay", lambda s: s["replay"].update(promised=[[1, [4]]]), r"replay groups that are not in the pool: \[4\]"),
    ("payloads", lambda s: s["payloads"].clear(), "the tokens of the groups .* are missing"),
    ("payloads", lambda s: s["payloads"].append(s["payloads"][0]), "a group is there twice"),
    ("payloads", lambda s: s["payloads"][0].pop("samples/tokens/offsets"), "it has no 'samples/tokens/offsets'"),
    ("payloads", lambda s: s["payloads"][0].pop("groups/text/values"), "text|rows"),
    ("payloads", lambda s: s["payloads"][0]["groups/text/values"].zero_(), "DecodeError"),
    ("source", lambda s: s["source"].pop("dataset"), "it has no 'dataset'"),
    ("samples", lambda s: s.pop("samples"), "it has no 'samples'"),
    ("samples", lambda s: s["samples"].update(per_group=0), "in groups of 1 or more"),
]


@pytest.mark.parametrize(("part", "damage", "message"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_the_damaged_part_is_named_with_what_is_wrong(
    tmp_path: Path, part: str, damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    state = copy.deepcopy(busy_buffer(tmp_path).state_dict())
    damage(state)
    wanted = rf"--load: the buffer's part of the checkpoint \(buffer.json\) is damaged at '{part}': .*{message}"
    with pytest.raises(ValueError, match=wanted):
        make_buffer(tmp_path).load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "state", {}, {"format": 2}, {"format": "other"}])
def test_what_is_no_state_of_this_version_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ValueError, match=r"--load: (buffer state of format|the buffer's state must be a dictionary)"):
        make_buffer(tmp_path).load_state_dict(state)


def test_files_that_are_cut_short_are_named(tmp_path: Path) -> None:
    state, path = busy_buffer(tmp_path).state_dict(), tmp_path / "buffer.json"
    save_state(path, state)
    whole = {file: file.read_bytes() for file in (path, path.with_suffix(".safetensors"))}
    for file, content in whole.items():
        for size in (0, 1, 9, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            with pytest.raises(ValueError, match=r"buffer.json: "):
                load_state(path)
        file.unlink()
        with pytest.raises(ValueError, match=r"buffer.json: "):
            load_state(path)
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=r"buffer.json: "):
            load_state(path)
        file.write_bytes(content)
    for text in ("[1]", "null", '"x"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"buffer.json: must hold a JSON object"):
            load_state(path)
    path.write_text(json.dumps({"a": {"__tensor__": "gone"}}))
    with pytest.raises(ValueError, match=r"lacks 'gone'"):
        load_state(path)


@pytest.mark.parametrize("seed", range(12))
def test_sample_indices_are_unique_through_resumes_with_any_group_size(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    buffer = make_buffer(tmp_path)
    trained: list[int] = []
    groups: list[int] = []
    for step in range(25):
        for group in buffer.reserve(rng.randint(2, 5)):
            if rng.random() < 0.4:
                if rng.random() < 0.5:
                    fill(group)
                buffer.requeue(group)
            elif rng.random() < 0.1:
                buffer.drop(group, "bad")
            else:
                buffer.admit(fill(group))
        while len(buffer) < 2:
            for group in buffer.reserve(2):
                buffer.admit(fill(group))
        taken = buffer.take(step, 2)
        fresh = [group for group in taken if not group.replays]
        buffer.commit(step)
        trained += [sample.index for group in fresh for sample in group.samples]
        groups += [group.group_index for group in fresh]
        assert all(s.rollout_id == s.index for g in fresh for s in g.samples)
        if rng.random() < 0.5:
            state = through_disk(buffer.state_dict())
            buffer = make_buffer(tmp_path, "--n-samples-per-prompt", str(rng.choice([2, 3, 5, 8])))
            buffer.load_state_dict(state)
            live = [s.index for g in buffer.payloads.get_many(buffer.ledger.in_state("generated")) for s in g.samples]
            assert not set(live) & set(trained)
    assert len(set(trained)) == len(trained)
    assert len(set(groups)) == len(groups)
    assert max(trained) < 2**40


def test_a_resume_with_the_same_group_size_numbers_samples_as_the_whole_run_does(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    buffer.reserve(3)
    resumed = make_buffer(tmp_path)
    resumed.load_state_dict(through_disk(buffer.state_dict()))
    assert [s.index for group in resumed.reserve(4) for s in group.samples] == list(range(8))
    wider = make_buffer(tmp_path, "--n-samples-per-prompt", "4")
    wider.load_state_dict(through_disk(resumed.state_dict()))
    assert [s.index for group in wider.reserve(2) for s in group.samples] == list(range(8, 16))
