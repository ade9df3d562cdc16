from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.policies import PROMPT_SOURCES
from slime_rl.buffer.sources import FilePromptSource, check_prompt_lengths, read_prompts
from slime_rl.types import Prompt


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_source(tmp_path: Path, *flags: str) -> FilePromptSource:
    return PROMPT_SOURCES.load("file")(make_config(tmp_path, *flags))


def drawn(source: FilePromptSource, n: int) -> list[tuple[int, int]]:
    return [(epoch, prompt.source_index) for epoch, prompt in source.next_prompts(n)]


def test_eight_prompts_of_three_rows_span_three_epochs(tmp_path: Path) -> None:
    order = drawn(make_source(tmp_path), 8)
    assert [epoch for epoch, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert sorted(row for _, row in order[:3]) == sorted(row for _, row in order[3:6]) == [0, 1, 2]


def test_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    prompts = str(write_prompts(tmp_path / "many.jsonl", 50))
    one = drawn(make_source(tmp_path, "--prompt-data", prompts), 100)
    several = make_source(tmp_path, "--prompt-data", prompts)
    assert [row for n in (7, 40, 3, 50) for row in drawn(several, n)] == one
    assert one[:50] != sorted(one[:50])
    assert [row for _, row in one[:50]] != [row for _, row in one[50:]]
    assert drawn(make_source(tmp_path, "--prompt-data", prompts, "--seed", "5"), 100) != one
    in_order = drawn(make_source(tmp_path, "--prompt-data", prompts, "--no-shuffle"), 50)
    assert in_order == [(0, row) for row in range(50)]


def test_epoch_order_never_changes_between_versions_of_this_code(tmp_path: Path) -> None:
    prompts = str(write_prompts(tmp_path / "many.jsonl", 8))
    source = make_source(tmp_path, "--prompt-data", prompts, "--seed", "1234")
    assert [row for _, row in drawn(source, 8)] == GOLDEN_ORDER


GOLDEN_ORDER = [1, 6, 4, 0, 3, 5, 2, 7]


@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_loaded_source_goes_on_where_it_was_even_at_an_epochs_end(tmp_path: Path, at: int) -> None:
    source = make_source(tmp_path)
    expected = drawn(make_source(tmp_path), 12)
    drawn(source, at)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make_source(tmp_path)
    resumed.load_state_dict(state)
    assert drawn(resumed, 12 - at) == expected[at:]


def test_a_checkpoint_of_another_dataset_is_refused_and_both_are_named(tmp_path: Path) -> None:
    state = make_source(tmp_path).state_dict()
    other = make_source(tmp_path, "--prompt-data", str(write_prompts(tmp_path / "other.jsonl", 4)))
    with pytest.raises(ValueError, match=r"trained on prompts.jsonl .*but --prompt-data is other.jsonl"):
        other.load_state_dict(state)
    changed = make_source(tmp_path)
    (tmp_path / "prompts.jsonl").write_text((tmp_path / "prompts.jsonl").read_text().replace("0+1", "0+2"))
    changed = FilePromptSource(changed.config)
    with pytest.raises(ValueError, match="hash"):
        changed.load_state_dict(state)


def test_another_order_of_the_same_dataset_is_refused(tmp_path: Path) -> None:
    state = make_source(tmp_path).state_dict()
    with pytest.raises(ValueError, match="seed 1234, this run has 7"):
        make_source(tmp_path, "--seed", "7").load_state_dict(state)


def test_an_empty_dataset_is_an_error_at_start(tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"--prompt-data: no rows in .*empty.jsonl"):
        make_source(tmp_path, "--prompt-data", str(empty))
    with pytest.raises(ValueError, match=r"no rows in .*@\[.*\] \(of \d+ rows\)"):
        make_source(tmp_path, "--prompt-data", f"{write_prompts(tmp_path / 'p.jsonl')}@[5:]")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "label": "1"}, r"bad.jsonl:3: no 'prompt' \(--input-key\); the row has label, question"),
        (
            {"prompt": "x", "answer": "1"},
            r"bad.jsonl:3: 'label' \(--label-key\) is missing; the row has answer, prompt",
        ),
        ({"prompt": "x", "label": None}, r"bad.jsonl:3: 'label' .* is null"),
        ({"prompt": "", "label": "1"}, r"bad.jsonl:3: 'prompt' .* is empty"),
        ({"prompt": [{"role": "user"}], "label": "1"}, r"bad.jsonl:3: .*message 0 must have 'role' and 'content'"),
        ({"prompt": 5, "label": "1"}, r"bad.jsonl:3: .*must be text or a list of chat messages, got int 5"),
        ({"prompt": "x", "label": "1", "metadata": [1]}, r"bad.jsonl:3: .*--metadata-key.* must be a dictionary"),
        ([1, 2], r"bad.jsonl:3: a row must be a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_key(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": "ok", "label": "1"}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        make_source(tmp_path, "--prompt-data", str(path))


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", \n')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: not valid JSON"):
        make_source(tmp_path, "--prompt-data", str(path))


def test_bytes_that_are_no_text_and_half_characters_are_named(tmp_path: Path) -> None:
    good = b'{"prompt": "1", "label": "1"}\n'
    for bad, message in (
        (rb'{"prompt": "1\ud800", "label": "1"}', r"bad.jsonl:2: 'prompt': must be text, .* '\\ud800'"),
        (
            rb'{"prompt": "1", "label": "1", "metadata": {"a": ["\udfff"]}}',
            "bad.jsonl:2: 'metadata': 'a': must be text",
        ),
        (b"\0\0\0\0", r"bad.jsonl:2: not valid JSON: Expecting value: line 1 column 1 "),
        (b'{"prompt": ', r"bad.jsonl:2: not valid JSON: Expecting value: line 1 column 11 "),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + good + bad + b"\n")
        with pytest.raises(ValueError, match=message):
            make_source(tmp_path, "--prompt-data", str(path))


def test_bad_rows_are_skipped_and_counted_by_flag(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\noops\n{"prompt": "b", "label": "2"}\n')
    source = make_source(tmp_path, "--prompt-data", str(path), "--bad-rows", "skip")
    assert (len(source), source.skipped_rows()) == (2, {"bad": 1, "long": 0})
    assert sorted(row for _, row in drawn(source, 4)) == [0, 0, 2, 2]
    path.write_text("oops\n")
    with pytest.raises(ValueError, match="every one of 1 rows is bad"):
        make_source(tmp_path, "--prompt-data", str(path), "--bad-rows", "skip")


def test_labels_are_not_needed_when_the_flag_says_so(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    assert make_source(tmp_path, "--prompt-data", str(path), "--label-key", "none").get(0).label is None


def test_a_label_of_zero_or_false_is_a_label(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "label": 0}, {"prompt": "a", "label": False}])
    source = make_source(tmp_path, "--prompt-data", str(path))
    assert [source.get(i).label for i in range(2)] == [0, False]


def test_long_prompts_end_the_run_or_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "x" * n, "label": "1"} for n in (3, 50, 5)])
    flags = ("--prompt-data", str(path), "--max-prompt-len", "10")
    with pytest.raises(ValueError, match=r"p.jsonl:2: the prompt has 50 tokens, over --max-prompt-len 10"):
        make_source(tmp_path, *flags).limit_lengths(lambda prompt: list(prompt.prompt))
    source = make_source(tmp_path, *flags, "--long-prompt", "skip")
    source.limit_lengths(lambda prompt: list(prompt.prompt))
    assert (len(source), source.skipped_rows()) == (2, {"bad": 0, "long": 1})
    assert sorted(row for _, row in drawn(source, 2)) == [0, 2]


def test_every_prompt_too_long_is_an_error() -> None:
    prompts = [Prompt(source_index=4, prompt="abc", label=None, metadata={})]
    with pytest.raises(ValueError, match="leaves no prompt at all; the last one: prompt 4"):
        check_prompt_lengths(prompts, lambda p: list(p.prompt), 2, "skip")


def test_read_prompts_gives_all_rows_in_file_order(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    prompts = read_prompts(f"{write_prompts(tmp_path / 'eval.jsonl', 5)}@[1:4]", config.data)
    assert [p.prompt for p in prompts] == ["1+2=", "2+3=", "3+4="]
    assert [p.source_index for p in prompts] == [0, 1, 2]
