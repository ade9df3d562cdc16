"""Which files of a folder are the data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import make_config

from slime_rl.buffer.sources import parse_data_spec, read_prompts

ROWS = [{"prompt": f"p{i}", "label": str(i)} for i in range(4)]


def names_of(spec: Path | str) -> list[str]:
    return [Path(file.path).name for file in parse_data_spec(str(spec))]


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_a_saved_dataset_is_the_files_that_it_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved), num_shards=2)
    mapped = datasets.load_from_disk(str(saved)).map(lambda row: {"label": row["label"] + "!"})
    assert len(mapped) == 4
    assert len(list(saved.glob("cache-*.arrow"))) > 0
    wanted = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names_of(saved) == names_of(f"{saved}/*.arrow") == names_of(tmp_path) == wanted
    assert [p.prompt for p in read_prompts(str(saved), make_config(tmp_path).data)] == ["p0", "p1", "p2", "p3"]
    datasets.Dataset.from_list(ROWS[:1]).save_to_disk(str(saved))
    assert len(list(saved.glob("data-*.arrow"))) == 3  # shards of the larger one are left there
    assert names_of(saved) == ["data-00000-of-00001.arrow"]
    (saved / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"state\.json lists .*data-00000-of-00001\.arrow, which is not there"):
        parse_data_spec(str(saved))
    (saved / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state\.json is no state of a saved dataset: KeyError"):
        parse_data_spec(str(saved))


def test_a_folder_of_yaml_files(tmp_path: Path) -> None:
    folder = put(tmp_path / "y", "b.yml", "a.yaml")
    assert names_of(folder) == ["a.yaml", "b.yml"]


def test_settings_beside_data_are_no_data(tmp_path: Path) -> None:
    folder = put(tmp_path / "y", "a.parquet", "card.yaml", "dataset_infos.json", ".cache/b.parquet")
    assert names_of(folder) == ["a.parquet"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.jsonl", "b.parquet"), r"holds \.parquet and \.jsonl files; say which"),
        (("data/train-0.parquet", "data/test-0.parquet"), "holds test and train files; say which"),
        (("train/0.jsonl", "val/0.jsonl"), "holds train and validation files"),
        (("gsm8k_train.jsonl", "gsm8k_dev.jsonl"), "holds train and validation files"),
        (("a.json", "b.yaml"), r"holds \.json and \.yaml files"),
    ],
)
def test_a_folder_that_may_mean_several_things_is_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_data_spec(str(put(tmp_path / "y", *names)))


def test_several_shards_of_one_split_are_one_folder(tmp_path: Path) -> None:
    assert names_of(put(tmp_path / "y", "training/train-1.parquet", "training/train-0.parquet")) == [
        "train-0.parquet",
        "train-1.parquet",
    ]
