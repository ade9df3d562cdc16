"""A resume at any row: the cursor means the same whatever is known of the rows so far."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import through_disk
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config
from slime_rl.types import Prompt

LIMIT = 10


def shortest_first(config: Config, epoch: int, rows: list[int], prompt_of: Callable[[int], Prompt]) -> list[int]:
    """Leaves a row out and repeats one, so that an epoch has another length than the file."""
    ranked = sorted(rows, key=lambda row: (len(prompt_of(row).prompt), (row * 7 + epoch) % 5))
    return [*ranked[1:], ranked[0], ranked[-1]]


def write_files(tmp_path: Path, seed: int) -> tuple[Path, Path]:
    """Two files with good rows, bad ones of several kinds, and prompts that are too long."""
    rng = random.Random(seed)
    paths = []
    for name in ("a.jsonl", "b.jsonl"):
        lines = []
        for number in range(rng.randint(8, 12)):
            good = json.dumps({"prompt": f"{name[0]}{number}", "label": "1"})
            long = json.dumps({"prompt": f"{name[0]}{number}" + "x" * LIMIT, "label": "1"})
            lines.append(rng.choice([good, good, good, long, "oops", '{"question": 1}']))
        lines[0] = json.dumps({"prompt": name[0], "label": "1"})
        paths.append(tmp_path / name)
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths[0], paths[1]


def open_source(config: Config) -> FilePromptSource:
    source = FilePromptSource(config)
    source.limit_lengths(lambda prompt: list(prompt.prompt))
    return source


def drawn(source: FilePromptSource, count: int) -> list[tuple[int, int]]:
    return [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(count)]


@pytest.mark.parametrize("curriculum", [(), ("--curriculum-path", f"{__name__}:shortest_first")], ids=["plain", "own"])
@pytest.mark.parametrize("shuffle", ["--shuffle", "--no-shuffle"])
@pytest.mark.parametrize("spec", ["{a}", "{a}@[1:7],{b}@[-6:]", "{a}@2,{b}@0.5", "{a}@[0:6]@1.5,{b}@[2:]@0.4,{a}"])
def test_a_resume_at_any_prompt_of_three_epochs_draws_what_the_whole_run_draws(
    tmp_path: Path, curriculum: tuple[str, ...], shuffle: str, spec: str
) -> None:
    a, b = write_files(tmp_path, seed=len(spec))
    skip = ("--bad-rows", "skip", "--long-prompt", "skip", "--max-prompt-len", str(LIMIT), "--check-rows", "1")
    data = ("--prompt-data", spec.format(a=a, b=b))
    config = make_config(tmp_path, *data, *skip, shuffle, *curriculum)
    whole = open_source(config)
    wanted: list[tuple[int, int]] = []
    while not wanted or wanted[-1][0] < 3:
        wanted += drawn(whole, 1)
    killed = open_source(config)
    for at in range(len(wanted)):
        state = through_disk(killed.state_dict())
        resumed = open_source(config)  # knows of the first row only
        resumed.load_state_dict(state)
        assert drawn(resumed, len(wanted) - at) == wanted[at:]
        resumed.load_state_dict(state)  # back to the checkpoint in the same process: knows of every row
        assert drawn(resumed, len(wanted) - at) == wanted[at:]
        assert drawn(killed, 1) == wanted[at : at + 1]
        if at % 3 == 0:
            killed = open_source(config)
            killed.load_state_dict(through_disk(resumed_at(config, state, wanted[at : at + 1])))


def resumed_at(config: Config, state: dict[str, Any], draws: list[tuple[int, int]]) -> dict[str, Any]:
    """The state after one more life that drew `draws` from `state`."""
    life = open_source(config)
    life.load_state_dict(state)
    assert drawn(life, len(draws)) == draws
    return life.state_dict()


def test_a_row_that_turns_bad_between_two_looks_keeps_its_place_in_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(7)))
    config = make_config(tmp_path, "--prompt-data", str(path), "--bad-rows", "skip")
    bad_rows: set[int] = set()

    def open_() -> FilePromptSource:
        source = open_source(config)
        read = source.table.get

        def get(row: int) -> Any:
            if row in bad_rows:
                raise ValueError(f"row {row} cannot be read")
            return read(row)

        monkeypatch.setattr(source.table, "get", get)
        return source

    killed = open_()
    first = drawn(killed, 2)
    bad_rows |= {row for row in range(7) if row not in {row for _, row in first}} & {1, 4, 5}
    rest = []
    for _ in range(25):
        state = through_disk(killed.state_dict())
        resumed = open_()
        resumed.load_state_dict(state)
        rest += drawn(killed, 1)
        assert drawn(resumed, 1) == rest[-1:]
    per_epoch = {row for epoch, row in [*first, *rest] if epoch == 0}
    assert per_epoch == set(range(7)) - bad_rows


def test_a_run_that_a_bad_row_ended_goes_on_with_the_flag_that_its_message_names(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [json.dumps({"prompt": f"p{i}", "label": "1"}) for i in range(5)]
    rows[3] = "oops"
    path.write_text("\n".join(rows) + "\n")
    flags = ("--prompt-data", str(path), "--no-shuffle", "--check-rows", "1")
    ended = open_source(make_config(tmp_path, *flags))
    assert [row for _, row in drawn(ended, 3)] == [0, 1, 2]
    state = through_disk(ended.state_dict())
    with pytest.raises(ValueError, match=r"p.jsonl:4: .*--bad-rows skip"):
        drawn(ended, 1)
    resumed = open_source(make_config(tmp_path, *flags, "--bad-rows", "skip"))
    resumed.load_state_dict(state)
    assert [row for _, row in drawn(resumed, 3)] == [4, 0, 1]


CALLS = iter(range(1_000_000))


def moody(config: Config, epoch: int, rows: list[int], prompt_of: Callable[[int], Prompt]) -> list[int]:
    turn = next(CALLS) % len(rows)
    return rows[turn:] + rows[:turn]


def test_a_curriculum_that_does_not_give_the_same_order_again_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--curriculum-path", f"{__name__}:moody")
    state = open_source(config).state_dict()
    with pytest.raises(ValueError, match=r"--curriculum-path .*:moody gives epoch 0 another order than before"):
        open_source(config).load_state_dict(state)


@pytest.mark.parametrize(("key", "value"), [("epoch", -1), ("position", 99), ("position", "2"), ("epoch", None)])
def test_a_cursor_that_points_nowhere_is_refused_and_nothing_changes(tmp_path: Path, key: str, value: Any) -> None:
    source = open_source(make_config(tmp_path))
    drawn(source, 2)
    before = source.state_dict()
    with pytest.raises(ValueError, match="--load: the data cursor is at"):
        source.load_state_dict({**before, key: value})
    assert source.state_dict() == before


@pytest.mark.parametrize("flags", [("--bad-rows", "error"), ("--long-prompt", "error")])
def test_a_row_that_ends_the_run_takes_none_of_those_before_it(tmp_path: Path, flags: tuple[str, str]) -> None:
    """Production runs ahead: a step that is saved after the error must still have the rows that were drawn with it."""
    bad = "oops" if flags[0] == "--bad-rows" else json.dumps({"prompt": "x" * (LIMIT + 1), "label": "1"})
    rows = [json.dumps({"prompt": str(i), "label": "1"}) for i in range(8)]
    rows[5] = bad
    (tmp_path / "p.jsonl").write_text("\n".join(rows) + "\n")
    common = ("--prompt-data", str(tmp_path / "p.jsonl"), "--no-shuffle", "--check-rows", "1", "--max-prompt-len")
    source = open_source(make_config(tmp_path, *common, str(LIMIT), *flags))
    assert drawn(source, 3) == [(0, 0), (0, 1), (0, 2)]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"p\.jsonl:6"):
            source.next_prompts(4)
    state = through_disk(source.state_dict())
    again = open_source(make_config(tmp_path, *common, str(LIMIT), flags[0], "skip"))
    again.load_state_dict(state)
    assert drawn(again, 4) == [(0, 3), (0, 4), (0, 6), (0, 7)]
