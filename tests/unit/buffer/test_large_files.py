"""Files that are larger than memory: what is read when, and what is said about a bad row that is found late."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import through_disk
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource, json_lines, read_prompts, rows
from slime_rl.buffer.sources.json_lines import JsonLines, index_lines
from slime_rl.buffer.sources.rows import open_rows
from slime_rl.config import Config
from slime_rl.types import Prompt


def write_rows(path: Path, prompts: list[Any]) -> Path:
    lines = [json.dumps({"prompt": p, "label": "1"}) if isinstance(p, str) else json.dumps(p) for p in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_source(tmp_path: Path, path: Path, *flags: str) -> FilePromptSource:
    return FilePromptSource(make_config(tmp_path, "--prompt-data", str(path), "--no-shuffle", *flags))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_lines_are_found_wherever_chunks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK", chunk)
    rng = random.Random(chunk)
    kinds = [b'{"a": 1}', b"", b"   ", b'  {"b": 2}', b"\t\r", b'{"text": "' + b"x" * 30 + b'"}', b'{"c": 3}\r']
    for last in (b"", b"\n", b"\n\n", b"\n  "):
        lines = [rng.choice(kinds) for _ in range(40)]
        path = tmp_path / "x.jsonl"
        path.write_bytes(b"\n".join(lines) + last)
        wanted = [(i + 1, line) for i, line in enumerate(lines) if line and not line.isspace()]
        file = JsonLines(str(path))
        assert len(file) == len(wanted)
        assert [file.read(row) for row in range(len(file))] == [json.loads(line) for _, line in wanted]
        assert [file.where(row) for row in range(len(file))] == [f"{path}:{number}" for number, _ in wanted]
        assert len(index_lines(str(path), limit=5)[0]) == 5


def test_a_bad_row_behind_the_checked_ones_is_named_when_it_is_drawn(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", "b", {"question": "c"}, "d"])
    with pytest.raises(ValueError, match=r"p.jsonl:3: no 'prompt'"):
        make_source(tmp_path, path, "--check-rows", "0")
    source = make_source(tmp_path, path, "--check-rows", "2")
    source.next_prompts(2)
    with pytest.raises(ValueError, match=r"p.jsonl:3: no 'prompt' .*--bad-rows skip"):
        source.next_prompts(1)


def test_rows_that_are_skipped_late_are_counted_and_a_resume_skips_the_same(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", {"x": 1}, "b" * 50, "c", "d"])
    flags = ("--bad-rows", "skip", "--long-prompt", "skip", "--max-prompt-len", "10", "--check-rows", "1")

    def encode(prompt: Prompt) -> list[str]:
        return list(prompt.prompt)

    drawn = {}
    for check_rows in ("1", "0"):
        source = make_source(tmp_path, path, *flags, "--check-rows", check_rows)
        source.limit_lengths(encode)
        drawn[check_rows] = [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(7)]
        assert source.skipped_rows() == {"bad": 1, "long": 1}
        again = make_source(tmp_path, path, *flags)
        again.limit_lengths(encode)
        again.load_state_dict(source.state_dict())
        assert [p.source_index for _, p in again.next_prompts(2)] == [3, 4]
    assert drawn["1"] == drawn["0"] == [(0, 0), (0, 3), (0, 4), (1, 0), (1, 3), (1, 4), (2, 0)]


def test_skipped_rows_are_in_the_buffers_counts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", {"x": 1}, "c"])
    source = make_source(tmp_path, path, "--bad-rows", "skip")
    assert LedgerBuffer(source.config, source).counts()["skipped_rows/bad"] == 1


def test_a_dataset_that_turns_out_to_have_no_usable_row_is_an_error_not_a_hang(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", "b" * 20, "c" * 20])
    source = make_source(tmp_path, path, "--long-prompt", "skip", "--max-prompt-len", "10", "--check-rows", "1")
    source.limit_lengths(lambda prompt: list(prompt.prompt))
    assert [p.source_index for _, p in source.next_prompts(2)] == [0, 0]
    path.write_text("oops\n" * 3)
    with pytest.raises(ValueError, match="every one of 3 rows is bad"):
        make_source(tmp_path, path, "--bad-rows", "skip", "--check-rows", "2")
    first_good = write_rows(tmp_path / "q.jsonl", ["x" * 20, "y" * 20])
    source = make_source(tmp_path, first_good, "--long-prompt", "skip", "--max-prompt-len", "10", "--check-rows", "1")
    source._encode = lambda prompt: list(prompt.prompt)
    source._rows[:] = 0  # as if the check had been of other rows
    with pytest.raises(ValueError, match=r"none of 2 rows can be used: \{'bad': 0, 'long': 2\}"):
        source.next_prompts(1)


def test_parquet_row_groups_stay_in_memory_as_far_as_the_budget_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"prompt": [f"{i}" * 50 for i in range(100)], "label": ["1"] * 100})
    path = tmp_path / "p.parquet"
    pq.write_table(table, path, row_group_size=10)
    block_bytes = table.slice(0, 10).nbytes
    monkeypatch.setattr(rows, "_CACHE_BYTES", 3 * block_bytes)
    file = open_rows(str(path))
    loads: list[int] = []
    blocks = file._blocks  # type: ignore[attr-defined]
    inner = blocks._load
    blocks._cache_bytes, blocks._load = 3 * block_bytes, lambda number: loads.append(number) or inner(number)
    order = random.Random(0).sample(range(100), 100)
    assert [file.read(row)["prompt"] for row in order] == [f"{row}" * 50 for row in order]
    assert blocks._nbytes <= 3.2 * block_bytes and len(blocks._cached) <= 3
    assert len(loads) > 10
    loads.clear()
    assert [file.read(row)["prompt"] for row in (5, 7, 3, 9)] == [f"{row}" * 50 for row in (5, 7, 3, 9)]
    assert len(loads) <= 1


def test_yaml_rows_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text('- prompt: a\n  label: "1"\n\n- prompt: b\n  metadata: {x: 1}\n  label: 2\n- question: c\n')
    config = make_config(tmp_path)
    with pytest.raises(ValueError, match=r"p.yaml:7: no 'prompt'"):
        read_prompts(str(path), config.data)
    prompts = read_prompts(f"{path}@[0:2]", config.data)
    assert [(p.prompt, p.label, p.metadata) for p in prompts] == [("a", "1", {}), ("b", 2, {"x": 1})]
    path.write_text("prompt: a\n")
    with pytest.raises(ValueError, match=r"p.yaml: must hold a list of rows, got dict"):
        read_prompts(str(path), config.data)


def backwards(config: Config, epoch: int, rows: list[int], prompt_of: Any) -> list[int]:
    return sorted(rows, reverse=True)


def out_of_range(config: Config, epoch: int, rows: list[int], prompt_of: Any) -> list[int]:
    return [*rows, 99]


def nothing(config: Config, epoch: int, rows: list[int], prompt_of: Any) -> list[int]:
    return []


def no_list(config: Config, epoch: int, rows: list[int], prompt_of: Any) -> Any:
    return "all"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out_of_range", r"returned rows that epoch 0 does not have: \[99\]"),
        ("nothing", "leaves no row of epoch 0"),
        ("no_list", "must return a list of row numbers, got 'all'"),
    ],
)
def test_a_curriculum_that_breaks_the_rules_is_named(tmp_path: Path, name: str, message: str) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", "b"])
    with pytest.raises(ValueError, match=f"--curriculum-path test_large_files:{name} {message}"):
        make_source(tmp_path, path, "--curriculum-path", f"test_large_files:{name}")


def test_a_curriculum_sees_usable_rows_only_and_another_one_is_refused_on_resume(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a", {"x": 1}, "c", "d"])
    flags = ("--bad-rows", "skip", "--check-rows", "1", "--curriculum-path", "test_large_files:backwards")
    source = make_source(tmp_path, path, *flags)
    assert [prompt.source_index for _, prompt in source.next_prompts(5)] == [3, 2, 0, 3, 2]
    plain = make_source(tmp_path, path, "--bad-rows", "skip")
    with pytest.raises(ValueError, match="data order has curriculum 'test_large_files:backwards', this run has None"):
        plain.load_state_dict(through_disk(source.state_dict()))


def test_a_curriculum_goes_on_with_the_same_rows_when_long_prompts_are_left_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ["a" * 30 if i % 3 == 0 else f"p{i}" for i in range(12)])
    flags = ("--long-prompt", "skip", "--max-prompt-len", "20", "--curriculum-path", "test_large_files:backwards")
    uninterrupted, before, after = (make_source(tmp_path, path, *flags) for _ in range(3))
    for source in (uninterrupted, before, after):
        source.limit_lengths(lambda prompt: list(prompt.prompt))
    first = before.next_prompts(4)
    after.load_state_dict(through_disk(before.state_dict()))
    assert [*first, *after.next_prompts(12)] == uninterrupted.next_prompts(16)
