"""The grammar of --prompt-data: `FILE[@[start:stop]][@WEIGHT]`, comma separated, with globs and folders."""

from __future__ import annotations

import glob
import math
import re
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = re.compile(r"^(?P<path>.+?)(?:@\[(?P<slice>[^\]]*)\])?(?:@(?P<weight>[0-9.eE+-]+))?$")
SUPPORTED = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".yaml", ".yml")
# Files that a Hugging Face datasets folder has beside its data.
_NOT_DATA = {"dataset_info.json", "state.json", "dataset_dict.json"}


@dataclass(frozen=True)
class DataFile:
    """One file of a data spec. The slice counts its rows; the weight is how often an epoch sees each of them."""

    path: str
    start: int | None = None
    stop: int | None = None
    weight: float = 1.0

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
        match = _SUFFIXES.match(part)
        if match is None:
            raise ValueError(f"{flag}: an empty file name in {spec!r}")
        start, stop = _parse_slice(match["slice"], part, flag)
        weight = 1.0 if match["weight"] is None else _parse_weight(match["weight"], part, flag)
        files += [DataFile(path, start, stop, weight) for path in _expand(match["path"], flag)]
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
        found = sorted(p for p in glob.glob(path, recursive=True) if Path(p).suffix in SUPPORTED)
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
    """The data files of a folder: a saved Hugging Face dataset, or a tree of data files."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(p) for p in folder.iterdir() if (p / "state.json").is_file())
        raise ValueError(f"{flag}: {str(folder)!r} holds several splits; name one: {', '.join(splits)}")
    for suffix in (".arrow", ".parquet", ".jsonl", ".json", ".csv"):
        found = sorted(str(p) for p in folder.rglob(f"*{suffix}") if p.name not in _NOT_DATA)
        if found:
            return found
    raise ValueError(f"{flag}: the folder {str(folder)!r} holds no {', '.join(SUPPORTED)} file")
