from __future__ import annotations

import logging
from pathlib import Path

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.sources import FilePromptSource, parse_data_spec
from slime_rl.cluster.folders import check_spared


def source(tmp_path: Path, spec: str) -> FilePromptSource:
    return FilePromptSource(make_config(tmp_path, "--prompt-data", spec))


@pytest.mark.parametrize("bounds", ["[100:200]", "[3:3]", "[4:2]", "[:-5]"])
def test_a_slice_without_rows_is_refused_also_in_a_mixture(tmp_path: Path, bounds: str) -> None:
    easy, hard = write_prompts(tmp_path / "easy.jsonl", 5), write_prompts(tmp_path / "hard.jsonl", 5)
    with pytest.raises(ValueError, match=r"--prompt-data: .*easy\.jsonl@\[.*\] has no rows: the file has 5"):
        source(tmp_path, f"{easy}@{bounds},{hard}")


def test_an_empty_shard_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_prompts(tmp_path / "a.jsonl", 5)
    write_prompts(tmp_path / "b.jsonl", 2)
    (tmp_path / "c.jsonl").touch()
    with caplog.at_level(logging.WARNING):
        assert len(source(tmp_path, f"{tmp_path}/[abc].jsonl@[3:5]")) == 2  # b has none in the slice, a has
    assert [name for name in ("a", "b", "c") if f"{name}.jsonl@[3:5] has no rows" in caplog.text] == ["b", "c"]


def test_a_weight_without_end_is_refused(tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "p.jsonl", 5)
    with pytest.raises(ValueError, match=r"p\.jsonl@1e\+12 has a weight by which an epoch has 5,000,000,000,000 rows"):
        source(tmp_path, f"{data}@1e12")


def test_names_may_hold_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "me@host"
    folder.mkdir()
    data = write_prompts(folder / "x@2.jsonl", 5)
    spec = f"{data}@[1:3]@2"
    assert len(source(tmp_path, spec)) == 4
    assert [file.path for file in parse_data_spec(spec)] == [str(data)]
    with pytest.raises(ValueError, match=r"--overwrite would remove .*, which --prompt-data"):
        check_spared(make_config(tmp_path, "--prompt-data", spec), [folder])
    with pytest.raises(ValueError, match=r"--prompt-data must be a file that exists, got '.*/me@host/y\.jsonl'"):
        source(tmp_path, f"{folder}/y.jsonl@[1:3]")
