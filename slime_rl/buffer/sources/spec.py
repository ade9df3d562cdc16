"""The grammar of --prompt-data: `FILE[@[start:stop]][@WEIGHT]`, comma separated, with globs and folders."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slime_rl.config.checks import DATA_PART

SUPPORTED = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".yaml", ".yml")
# Files that a Hugging Face datasets folder has beside its data.
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
# Kinds of which a folder may have one. Beside them, .json and .yaml files are settings and cards.
_KINDS = ((".arrow",), (".parquet",), (".jsonl",), (".csv",))
_SPLIT = re.compile(r"(?<![a-z])(train|training|test|testing|valid|validation|val|dev|eval)(?![a-z])")
_SPLIT_OF = {"training": "train", "testing": "test", "val": "validation", "valid": "validation", "dev": "validation"}


@dataclass(frozen=True)
class DataFile:
    """One file of a data spec. The slice counts its rows; the weight is how often an epoch sees each of them."""

    path: str
    start: int | None = None
    stop: int | None = None
    weight: float = 1.0
    part: str = field(default="", compare=False)  # of the spec that named it, perhaps with others

    def __str__(self) -> str:
        """As it is written in a data spec."""
        start, stop = ("" if bound is None else bound for bound in (self.start, self.stop))
        sliced = "" if self.start is None and self.stop is None else f"@[{start}:{stop}]"
        return self.path + sliced + ("" if self.weight == 1.0 else f"@{self.weight:g}")


def parse_data_spec(spec: str, flag: str = "--prompt-data") -> list[DataFile]:
    """Every file that a spec names, in order; the matches of a glob and the files of a folder are sorted by name.

    Raises:
        ValueError: nothing there, a kind of file that is not read, or a slice or weight that is none.
    """
    files: list[DataFile] = []
    for part in (piece.strip() for piece in spec.split(",")):
        match = DATA_PART.match(part)
        if match is None:
            raise ValueError(f"{flag}: an empty file name in {spec!r}")
        start, stop = _parse_slice(match["slice"], part, flag)
        weight = 1.0 if match["weight"] is None else _parse_weight(match["weight"], part, flag)
        files += [DataFile(path, start, stop, weight, part) for path in _expand(match["path"], flag)]
    return files


def _parse_slice(text: str | None, part: str, flag: str) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    bounds = text.split(":")
    if len(bounds) != 2 or any(bound and not re.fullmatch(r"-?\d+", bound) for bound in bounds):
        raise ValueError(f"{flag}: a slice is written FILE@[start:stop], got {part!r}")
    start, stop = (int(bound) if bound else None for bound in bounds)
    return start, stop


def _parse_weight(text: str, part: str, flag: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not weight > 0 or math.isinf(weight):
        raise ValueError(f"{flag}: a weight is written FILE@NUMBER with a number > 0, got {part!r}")
    return weight


def _expand(path: str, flag: str) -> list[str]:
    if glob.has_magic(path) and not Path(path).exists():
        found = [str(p) for p in _only_data(map(Path, glob.glob(path, recursive=True)), flag)]
        if not found:
            raise ValueError(f"{flag}: no {', '.join(SUPPORTED)} file matches {path!r}")
        return found
    if Path(path).is_dir():
        return _expand_folder(Path(path), flag)
    if not Path(path).is_file():
        raise ValueError(f"{flag} must be a file that exists, got {path!r}")
    if Path(path).suffix not in SUPPORTED:
        raise ValueError(f"{flag}: cannot read {path!r}; its name must end in one of {', '.join(SUPPORTED)}")
    return [path]


def _expand_folder(folder: Path, flag: str) -> list[str]:
    """The data files of a folder: a saved Hugging Face dataset, or a tree of data files of one kind and one split.

    Raises:
        ValueError: none, or more than one may be meant; names them.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(p) for p in folder.iterdir() if (p / "state.json").is_file())
        raise ValueError(f"{flag}: {str(folder)!r} holds several splits; name one: {', '.join(splits)}")
    if (listed := _saved_files(folder, flag)) is not None:
        return [str(path) for path in listed]
    visible = (p for p in folder.rglob("*") if not any(name.startswith(".") for name in p.relative_to(folder).parts))
    tree = _only_data(visible, flag)
    by_kind = {kind: [p for p in tree if p.suffix in kind] for kind in (*_KINDS, (".json",), (".yaml", ".yml"))}
    have = [kind for kind in _KINDS if by_kind[kind]] or [kind for kind, found in by_kind.items() if found]
    if not have:
        raise ValueError(f"{flag}: the folder {str(folder)!r} holds no {', '.join(SUPPORTED)} file")
    if len(have) > 1:
        kinds = " and ".join(kind[0] for kind in have)
        raise ValueError(
            f"{flag}: the folder {str(folder)!r} holds {kinds} files; say which, as {folder}/*{have[0][0]}"
        )
    found = by_kind[have[0]]
    splits = {_split_of(p.relative_to(folder)) for p in found} - {None}
    if len(splits) > 1:
        words = " and ".join(sorted(map(str, splits)))
        raise ValueError(f"{flag}: the folder {str(folder)!r} holds {words} files; say which, as {found[0]}")
    return [str(p) for p in found]


def _split_of(path: Path) -> str | None:
    """The split that a path names, if any; its file name goes before its folders."""
    for part in reversed(path.parts):
        if match := _SPLIT.search(part.lower()):
            return _SPLIT_OF.get(match[1], match[1])
    return None


def _only_data(paths: Iterable[Path], flag: str) -> list[Path]:
    """Those of `paths` that hold rows, sorted."""
    listed: dict[Path, set[Path] | None] = {}
    found = []
    for path in paths:
        if path.suffix not in SUPPORTED or path.name in _NOT_DATA or not path.is_file():
            continue
        if path.suffix == ".arrow":
            if path.parent not in listed:
                files = _saved_files(path.parent, flag)
                listed[path.parent] = None if files is None else set(files)
            of_folder = listed[path.parent]
            if of_folder is not None and path not in of_folder:
                continue
        found.append(path)
    return sorted(found, key=str)


def _saved_files(folder: Path, flag: str) -> list[Path] | None:
    """The files that a folder of `save_to_disk` says it consists of, or None for another folder.

    Beside them may lie results of `map` (cache-*.arrow), and shards of what was saved there before.
    """
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in content["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{flag}: {state} is no state of a saved dataset: {type(error).__name__}: {error}") from error
    if content.get("_indices_data_files"):
        raise ValueError(f"{flag}: {str(folder)!r} holds a selection of rows; save it with a newer version of datasets")
    if missing := [str(path) for path in files if not path.is_file()]:
        raise ValueError(f"{flag}: {state} lists {', '.join(missing)}, which is not there")
    return files
