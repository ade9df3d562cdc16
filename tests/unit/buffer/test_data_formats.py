from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.sources import DataFile, FilePromptSource, parse_data_spec, read_prompts
from slime_rl.types import Prompt

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
VERL_ROW = {
    "prompt": CHAT,
    "data_source": "gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def prompts_of(tmp_path: Path, path: Path | str) -> list[Prompt]:
    return read_prompts(str(path), make_config(tmp_path).data)


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_verls_parquet_keys_are_read_as_they_are(tmp_path: Path) -> None:
    (prompt,) = prompts_of(tmp_path, write_parquet(tmp_path / "train.parquet", [VERL_ROW]))
    assert prompt.prompt == CHAT
    assert prompt.label == "4"
    assert prompt.metadata == {"data_source": "gsm8k", "ability": "math", "extra_info": {"index": 7, "split": "train"}}


def test_parquet_rows_are_found_in_any_row_group(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "label": i} for i in range(25)]
    prompts = prompts_of(tmp_path, write_parquet(tmp_path / "p.parquet", rows, row_group_size=4))
    assert [(p.prompt, p.label) for p in prompts] == [(f"p{i}", i) for i in range(25)]


def test_a_parquet_file_without_the_key_lists_what_it_has(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [{"question": "a", "label": "1"}])
    with pytest.raises(ValueError, match=r"p.parquet: row 0: no 'prompt' .*the row has label, question"):
        prompts_of(tmp_path, path)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"p.parquet: cannot be read"):
        prompts_of(tmp_path, tmp_path / "p.parquet")


def test_json_array_csv_and_json_lines_under_the_name_json(tmp_path: Path) -> None:
    rows = [{"prompt": "a, b", "label": "1"}, {"prompt": 'say "hi"\nthere', "label": "2"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "l.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c.csv").write_text('prompt,label\n"a, b",1\n"say ""hi""\nthere",2\n')
    for name in ("a.json", "l.json", "c.csv"):
        assert [(p.prompt, p.label) for p in prompts_of(tmp_path, tmp_path / name)] == [
            (row["prompt"], row["label"]) for row in rows
        ]


def test_a_csv_line_with_other_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("prompt,label\na,1\nb\n")
    with pytest.raises(ValueError, match=r"c.csv:3: .*the header's 2 columns"):
        prompts_of(tmp_path, tmp_path / "c.csv")


def test_a_saved_hugging_face_dataset_and_a_folder_of_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "label": str(i)} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "splits"))
    write_parquet(tmp_path / "train-00001.parquet", rows[3:])
    (tmp_path / "hub" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "hub" / "data" / "train-00000.parquet", rows[:3])
    write_parquet(tmp_path / "hub" / "data" / "train-00001.parquet", rows[3:])
    for folder in ("saved", "splits/train", "hub"):
        assert [p.prompt for p in prompts_of(tmp_path, tmp_path / folder)] == [f"p{i}" for i in range(5)]
    with pytest.raises(ValueError, match=r"several splits; name one: .*splits/train"):
        prompts_of(tmp_path, tmp_path / "splits")


def test_tools_and_multimodal_columns_are_carried_along(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": "x", "label": "1", "tools": json.dumps(tools), "images": ["a.png"], "metadata": {"level": 3}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = prompts_of(tmp_path, tmp_path / "p.jsonl")
    assert prompt.metadata == {"tools": tools, "images": ["a.png"], "level": 3}


def test_globs_lists_slices_and_weights(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write_prompts(tmp_path / name, 2)
    assert parse_data_spec(f"{tmp_path}/*.jsonl@2") == [
        DataFile(f"{tmp_path}/a.jsonl", weight=2.0),
        DataFile(f"{tmp_path}/b.jsonl", weight=2.0),
    ]
    assert parse_data_spec(f"{tmp_path}/a.jsonl@[0:1000], {tmp_path}/b.jsonl@[-1:]@0.5") == [
        DataFile(f"{tmp_path}/a.jsonl", 0, 1000),
        DataFile(f"{tmp_path}/b.jsonl", -1, None, 0.5),
    ]


@pytest.mark.parametrize(
    ("suffix", "message"), [("@[1]", "a slice is written"), ("@[a:b]", "a slice is written"), ("@-1", "a number > 0")]
)
def test_slices_and_weights_that_are_none_are_refused(tmp_path: Path, suffix: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_data_spec(f"{write_prompts(tmp_path / 'a.jsonl')}{suffix}")


def test_files_that_are_missing_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a file that exists"):
        parse_data_spec(str(tmp_path / "nope.jsonl"))
    with pytest.raises(ValueError, match=r"no .*file matches"):
        parse_data_spec(str(tmp_path / "*.jsonl"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="must end in one of"):
        parse_data_spec(str(tmp_path / "a.txt"))


def test_a_weight_says_how_often_an_epoch_sees_each_row(tmp_path: Path) -> None:
    a, b = write_prompts(tmp_path / "a.jsonl", 4), write_prompts(tmp_path / "b.jsonl", 6)
    source = FilePromptSource(make_config(tmp_path, "--prompt-data", f"{a}@2,{b}@0.5"))
    assert len(source) == 4 * 2 + 3
    first, second = (sorted(p.source_index for _, p in source.next_prompts(11)) for _ in range(2))
    assert first[:8] == second[:8] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(first[8:])) == len(set(second[8:])) == 3
    assert set(first[8:]) <= set(range(4, 10))
    assert first[8:] != second[8:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep.jsonl", b"[" * 100_000, r"deep\.jsonl:1: not valid JSON: .*recursion"),
        ("long.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", r"long\.jsonl:1: not valid JSON: .*digits"),
        ("deep.json", b"[" * 100_000, r"deep\.json: cannot be read: .*recursion"),
        ("deep.yaml", b"[" * 5_000, r"deep\.yaml: cannot be read: .*recursion"),
        ("latin.csv", "prompt,label\né,2\n".encode("latin1"), r"latin\.csv:2: not UTF-8: .*0xe9"),
        ("latin.json", '[{"prompt": "é"}]'.encode("latin1"), r"latin\.json: .*0xe9"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and "\\" not in value else "",
)
def test_what_breaks_a_parser_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(tmp_path / name), make_config(tmp_path).data, "--prompt-data")


def test_a_quotation_mark_that_is_not_closed_does_not_swallow_the_rest_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text('prompt,label\na,1\n"b"" said,2\nc,3\n')
    with pytest.raises(ValueError, match=r"c.csv:3: .*columns|c.csv:3: a quotation mark opens a field"):
        prompts_of(tmp_path, tmp_path / "c.csv")
    (tmp_path / "d.csv").write_text('prompt,label\na,1\nb,"2\nc,3\n')  # as many columns as the header has
    with pytest.raises(ValueError, match=r"d.csv:3: a quotation mark opens a field"):
        prompts_of(tmp_path, tmp_path / "d.csv")


def test_a_csv_field_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text(f"prompt,label\n{'1' * 200_000},2\n")
    (prompt,) = read_prompts(str(tmp_path / "long.csv"), make_config(tmp_path).data, "--prompt-data")
    assert len(prompt.prompt) == 200_000
