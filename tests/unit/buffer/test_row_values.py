"""What rows may hold, and which of them are bad rows: named by file and line, and left out with --bad-rows skip."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import fill
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource, read_prompts, table

GOOD = '{"prompt": "a", "label": "1"}\n'
BOM = b"\xef\xbb\xbf"
SKIP = ("--bad-rows", "skip")


def make_source(tmp_path: Path, path: Path, *flags: str) -> FilePromptSource:
    return FilePromptSource(make_config(tmp_path, "--prompt-data", str(path), "--no-shuffle", *flags))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def prompts_of(tmp_path: Path, path: Path, *flags: str) -> list[tuple[Any, Any]]:
    return [(p.prompt, p.label) for p in read_prompts(str(path), make_config(tmp_path, *flags).data)]


def test_bad_csv_rows_are_left_out_for_training_and_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'prompt,label\na,1\nb\n  \n\n"two\nlines",2\nc,3,4\n\xe9,5\nd,6\n')
    with pytest.raises(ValueError, match=r"a\.csv:3: .*the header's 2 columns, but 1 \(--bad-rows skip"):
        make_source(tmp_path, path)
    assert prompts_of(tmp_path, path, *SKIP) == [("a", "1"), ("two\nlines", "2"), ("d", "6")]
    assert make_source(tmp_path, path, *SKIP).skipped_rows()["bad"] == 3
    config = make_config(tmp_path).data
    for kept, line, problem in (("c,3,4\n", 6, "but 3"), ("\u00e9,5\n".encode("latin1").decode("latin1"), 6, "0xe9")):
        content = 'prompt,label\na,1\n\n"two\nlines",2\n' + kept
        with pytest.raises(ValueError, match=rf"b\.csv:{line}: .*{problem}"):
            read_prompts(str(write(tmp_path / "b.csv", content.encode("latin1"))), config)


def test_a_csv_header_that_cannot_be_read_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,prompt,label\na,b,1\n")
    with pytest.raises(ValueError, match=r"a\.csv: several columns are named 'prompt'"):
        make_source(tmp_path, path, *SKIP)
    with pytest.raises(ValueError, match=r"a\.csv:1: the header is not UTF-8"):
        make_source(tmp_path, write(path, "prompt,étiquette\na,b\n".encode("latin1")), *SKIP)


def test_parquet_and_arrow_columns_of_one_name_are_an_error_of_the_file(tmp_path: Path) -> None:
    content = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["1"])], names=["prompt", "prompt", "label"])
    pq.write_table(content, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(ValueError, match=rf"{name}: several columns are named 'prompt'"):
            make_source(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", GOOD),
        ("a.json", '[{"prompt": "a", "label": "1"}]'),
        ("a.csv", "prompt,label\na,1\n"),
        ("a.yaml", '- prompt: a\n  label: "1"\n'),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str, content: str) -> None:
    assert prompts_of(tmp_path, write(tmp_path / name, BOM + content.encode())) == [("a", "1")]


def test_a_damaged_parquet_page_costs_the_rows_of_its_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = pa.table({"prompt": [f"p{i}" * 50 for i in range(100)], "label": ["2"] * 100})
    pq.write_table(rows, path, row_group_size=50, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    for read in (lambda: make_source(tmp_path, path), lambda: prompts_of(tmp_path, path)):
        with pytest.raises(ValueError, match=r"a\.parquet: row 0: rows 0 to 49 cannot be read: .*--bad-rows skip"):
            read()
    source = make_source(tmp_path, path, *SKIP)
    assert (len(source), source.skipped_rows()["bad"], source.get(50).prompt[:3]) == (50, 50, "p50")
    assert len(prompts_of(tmp_path, path, *SKIP)) == 50


def test_one_text_that_is_no_utf8_costs_its_own_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array([b"a", b"\xff\xfe", b"c"]).view(pa.string())
    pq.write_table(pa.table({"prompt": texts, "label": ["1", "2", "3"]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: row 1: cannot be read: UnicodeDecodeError"):
        make_source(tmp_path, path)
    assert prompts_of(tmp_path, path, *SKIP) == [("a", "1"), ("c", "3")]


def test_dates_and_decimals_become_text_that_the_buffer_keeps(tmp_path: Path) -> None:
    extra = {
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "took": datetime.timedelta(minutes=2),
        "day": datetime.date(2024, 1, 2),
    }
    row = {"prompt": "a", "label": decimal.Decimal("1.50"), "extra_info": extra}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    write(tmp_path / "b.yaml", "- prompt: a\n  label: 2024-01-02\n  metadata: {2024-01-03: 12:30:00}\n")
    buffer_of = [make_source(tmp_path, tmp_path / name) for name in ("a.parquet", "b.yaml")]
    first, second = (source.get(0) for source in buffer_of)
    assert (first.label, second.label) == ("1.50", "2024-01-02")
    assert first.metadata == {"extra_info": {"when": "2024-01-02T03:04:05", "took": 120.0, "day": "2024-01-02"}}
    assert list(second.metadata) == ["2024-01-03"]
    for source in buffer_of:
        buffer = LedgerBuffer(source.config, source)
        (group,) = buffer.reserve(1)
        fill(group)
        buffer.admit(group)


BAD_ROWS = {
    "too_deep": (
        "jsonl",
        '{"prompt": "a", "label": "1", "metadata": {"x": ' + "[" * 150 + "]" * 150 + "}}\n",
        "100 levels",
    ),
    "deep_text": ("jsonl", '{"prompt": "a", "label": "1", "metadata": "' + "[" * 20_000 + '"}\n', "recursion"),
    "deep_tools": ("jsonl", '{"prompt": "a", "label": "1", "tools": "' + "[" * 20_000 + '"}\n', "recursion"),
    "long_number": ("jsonl", '{"prompt": "a", "label": "1", "metadata": "' + "9" * 5000 + '"}\n', "digits"),
    "surrogate": (
        "jsonl",
        '{"prompt": "a", "label": "1", "metadata": "{\\"x\\": \\"\\\\ud800\\"}"}\n',
        "surrogate pair",
    ),
    "date": ("yaml", "- prompt: a\n  label: 2024-13-45\n", "month must be in"),
    "itself": ("yaml", "- &x\n  prompt: a\n  label: 1\n  metadata: *x\n", "100 levels deep"),
    "same": ("yaml", "- prompt: a\n  label: 1\n  metadata: {2024-01-02: 1, '2024-01-02': 2}\n", "keys are the same"),
    "set": ("yaml", "- prompt: a\n  label: !!set {x, y}\n", "'label': is a set"),
    "hex": ("yaml", "- prompt: a\n  label: 0x" + "f" * 5000 + "\n", "14000 bits"),
    "tag": ("yaml", "- prompt: a\n  label: !!python/name:os.system\n", "could not determine a constructor"),
    "key": ("yaml", "- prompt: a\n  label: 1\n  ? [a, b]\n  : 3\n", "unhashable key"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_break_a_parser_or_cannot_be_kept_are_bad_rows(tmp_path: Path, name: str) -> None:
    kind, bad, problem = BAD_ROWS[name]
    good, line = (GOOD, 2) if kind == "jsonl" else ("- {prompt: a, label: '1'}\n", 2)
    path = write(tmp_path / f"rows.{kind}", good + bad + good)
    with pytest.raises(ValueError, match=rf"rows\.{kind}:{line}: .*{problem}.*--bad-rows skip"):
        make_source(tmp_path, path)
    assert prompts_of(tmp_path, path, *SKIP) == [("a", "1")] * 2


def test_a_long_number_in_a_json_array_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"prompt": "a", "label": ' + "9" * 5000 + "}]")
    with pytest.raises(ValueError, match=r"a\.json: not valid JSON: .*digits"):
        prompts_of(tmp_path, path)


def test_columns_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "- prompt: a\n  label: '1'\n  tags: !!set {x, y}\n")
    assert prompts_of(tmp_path, path) == [("a", "1")]


def test_checking_goes_on_until_a_row_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", "x\n" * 5 + GOOD * 3)
    source = make_source(tmp_path, path, *SKIP, "--check-rows", "2")
    assert source.skipped_rows()["bad"] == 5
    assert [p.source_index for _, p in source.next_prompts(4)] == [5, 6, 7, 5]
    assert [p.source_index for p in read_prompts(str(path), source.config.data, limit=2)] == [5]
    monkeypatch.setattr(table, "MOST_FURTHER", 2)
    with pytest.raises(ValueError, match=r"every one of the first 4 rows of 8 is bad; the first: .*a\.jsonl:1: "):
        make_source(tmp_path, path, *SKIP, "--check-rows", "2")


def test_length_checking_goes_on_until_a_row_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "x" * n, "label": "1"} for n in (50, 60, 70, 3, 80, 4)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--long-prompt", "skip", "--max-prompt-len", "10", "--check-rows", "2")
    source = make_source(tmp_path, path, *flags)
    source.limit_lengths(lambda prompt: list(prompt.prompt))
    assert source.skipped_rows() == {"bad": 0, "long": 3}
    assert [p.source_index for _, p in source.next_prompts(3)] == [3, 5, 3]
    monkeypatch.setattr("slime_rl.buffer.sources.file_source.MOST_FURTHER", 1)
    source = make_source(tmp_path, path, *flags)
    with pytest.raises(ValueError, match=r"leaves no prompt at all among the first 3 rows of 6; .*a\.jsonl:3: "):
        source.limit_lengths(lambda prompt: list(prompt.prompt))


def test_a_resume_with_other_keys_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "a", "question": "b", "label": "1"}\n')
    state = make_source(tmp_path, path).state_dict()
    with caplog.at_level(logging.WARNING):
        make_source(tmp_path, path).load_state_dict(state)
        assert not caplog.records
        make_source(tmp_path, path, "--input-key", "question").load_state_dict(state)
    assert "--input-key was 'prompt' and is 'question' now" in caplog.text
