"""Checkpoints on disk: written aside, made whole, renamed, and only then named as the latest.

    <save>/step_00000010/   model/ (torch_dist: model, optimizer, scheduler, RNG) · buffer.json, .safetensors
                            meta.json (what it belongs to) · checksums.json (size and sum of every other file)
    <save>/latest           name of the newest complete one

`step` counts finished steps: a run continues with the step of the same number. A folder without `.partial` in its name
is complete: it got its name in one step, after everything in it was on disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

FORMAT = 2
CHECKSUMS = "checksums.json"
_REPLACED = ".old.partial"  # a checkpoint on its way out
_NAME = re.compile(r"step_\d+")
_SUM = re.compile(r"[0-9a-f]{8}")
_BLOCK_BYTES = 1 << 22
_MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint belongs to; compared when it is loaded."""

    step: int
    model_type: str
    num_parameters_shape: str  # hidden size x layers x vocabulary, to tell models apart
    kind: Literal["run", "weights"] = "run"  # weights: made by a conversion, nothing else is in it
    hf_checkpoint: str | None = None  # Hugging Face folder of the run
    model_config: dict[str, Any] | None = None  # its config.json
    format: int = FORMAT


# Of meta.json: whether a value is one of its field, and the rule in words.
_META_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (lambda value: type(value) is int and value >= 0, "a whole number >= 0"),
    "model_type": (lambda value: isinstance(value, str), "text"),
    "num_parameters_shape": (lambda value: isinstance(value, str), "text"),
    "kind": (lambda value: value in ("run", "weights"), "run or weights"),
    "hf_checkpoint": (lambda value: value is None or isinstance(value, str), "text or null"),
    "model_config": (lambda value: value is None or isinstance(value, dict), "an object or null"),
}


class CheckpointStore:
    """All checkpoints of one run folder."""

    def __init__(self, root: Path, keep: int, keep_every: int | None = None) -> None:
        """`keep` newest ones stay, and those whose step is a multiple of `keep_every`."""
        self.root, self.keep, self.keep_every = root, keep, keep_every

    def write(self, meta: CheckpointMeta, fill: Callable[[Path], None]) -> Path:
        """`write_aside`, and make it the latest checkpoint."""
        self.write_aside(meta, fill)
        return self.publish(meta)

    def write_aside(self, meta: CheckpointMeta, fill: Callable[[Path], None]) -> None:
        """Let `fill` write the parts into a folder aside, and make it whole; nobody finds it before `publish`.

        When `fill` fails (a full disk), what it wrote is removed and the checkpoints before stay as they are.
        """
        aside = self.begin(meta.step)
        try:
            fill(aside)
            self._complete(meta)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def begin(self, step: int) -> Path:
        """An empty folder aside for the parts of a checkpoint; what broken saves left behind is removed."""
        for left in self.root.glob("step_*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        aside = self._aside(step)
        (aside / "model").mkdir(parents=True)
        return aside

    def finish(self, meta: CheckpointMeta) -> Path:
        """Make the folder of `begin`, whose parts are all written, the latest checkpoint."""
        self._complete(meta)
        return self.publish(meta)

    def _complete(self, meta: CheckpointMeta) -> None:
        """Everything but the name."""
        aside = self._aside(meta.step)
        (aside / "meta.json").write_text(json.dumps(asdict(meta), indent=2))
        (aside / CHECKSUMS).write_text(json.dumps(_checksums(aside), indent=1))
        _sync_tree(aside)

    def publish(self, meta: CheckpointMeta) -> Path:
        """Give what `write_aside` has written its name, and make it the latest checkpoint."""
        aside, final = self._aside(meta.step), self.root / f"step_{meta.step:08d}"
        if final.exists():  # after a crash between rename and `latest`, or in a folder that was gone back in
            old = final.with_name(final.name + _REPLACED)
            final.rename(old)
            aside.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(final)
        _sync(self.root)
        _write_atomic(self.root / "latest", final.name)
        self._remove_old(meta.step)
        return final

    def latest(self, flag: str = "--load") -> tuple[Path, CheckpointMeta]:
        """The newest complete checkpoint. Its files are not read; `verify` does that. `flag` named the folder.

        Raises:
            ValueError: there is none, or it is incomplete or of another format.
        """
        pointer = self.root / "latest"
        if not pointer.is_file():
            raise ValueError(f"{flag} {self.root}: no file 'latest' there, so it holds no complete checkpoint")
        name = pointer.read_text(errors="replace").strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{flag} {pointer}: must hold the name of a checkpoint (step_00000020), got {name!r}")
        folder = self.root / name
        if not folder.is_dir():  # killed while one was replaced by another of the same step
            replaced = self.root / f"{name}{_REPLACED}"
            whole = self._whole() or [path for path in (replaced,) if (path / CHECKSUMS).is_file()]
            if not whole:
                raise ValueError(f"{flag} {self.root}: 'latest' names {name}, which is not there, nor another")
            folder = whole[-1]
        return folder, read_meta(folder, flag)

    def _aside(self, step: int) -> Path:
        return self.root / f"step_{step:08d}.partial"

    def _whole(self) -> list[Path]:
        """Complete checkpoints, oldest first; not what somebody has put beside them (step_00000020_copy)."""
        found = (p for p in self.root.glob("step_*") if p.is_dir() and _NAME.fullmatch(p.name))
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def _remove_old(self, newest: int) -> None:
        """Those of later steps are of a run that was gone back in; they stay until this one comes there."""
        steps = [(int(path.name.removeprefix("step_")), path) for path in self._whole()]
        for step, old in [(step, path) for step, path in steps if step <= newest][: -self.keep]:
            if self.keep_every is None or step % self.keep_every:
                aside = old.with_name(old.name + _REPLACED)
                old.rename(aside)  # in one step: half of a checkpoint must not look like one
                shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def hold_folder(flag: str, folder: Path) -> Iterator[None]:
    """Keep other processes that ask for it from writing checkpoints into a folder, which is made.

    Raises:
        ValueError: another has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it with the process, however it ends
        except BlockingIOError:
            raise ValueError(f"{flag} {folder}: another process is writing to it; choose another folder") from None
        yield
    finally:
        os.close(handle)


def find_checkpoint(path: Path, flag: str = "--load") -> tuple[Path, CheckpointMeta]:
    """What `flag` names: one checkpoint, or the newest in a folder of them.

    Raises:
        ValueError: there is none.
    """
    if (path / "meta.json").is_file():
        return path, read_meta(path, flag)
    return CheckpointStore(path, keep=1).latest(flag)


def read_meta(folder: Path, flag: str = "--load") -> CheckpointMeta:
    """meta.json of a checkpoint.

    Raises:
        ValueError: it cannot be read, or is of another format.
    """
    where = f"{flag} {folder}"
    content = _read_object(where, folder / "meta.json")
    if content.get("format") != FORMAT:
        raise ValueError(f"{where}: checkpoint format {content.get('format')!r}, this version reads {FORMAT}")
    for name, (is_valid, rule) in _META_RULES.items():
        value = content.get(name, "run" if name == "kind" else None)
        if not is_valid(value):
            raise ValueError(f"{where}: meta.json: {name} must be {rule}, got {_shown(value)}")
    if unknown := sorted(content.keys() - {field.name for field in fields(CheckpointMeta)}):
        raise ValueError(f"{where}: meta.json: must have the fields of format {FORMAT}, got also {unknown[0]!r}")
    return CheckpointMeta(**content)


def _read_object(where: str, path: Path) -> dict[str, Any]:
    """What a JSON file of a checkpoint holds. Raises ValueError that begins with `where` and names the file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: cannot read {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {path.name} must hold a JSON object, got {_shown(content)}")
    return content


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def verify(folder: Path, flag: str = "--load") -> int:
    """Read every file of a checkpoint and compare it with its checksum; returns the number of bytes.

    Raises:
        ValueError: a file is missing, has another size or other contents; names it.
    """
    expected = _read_checksums(folder, flag)
    for name, (size, _) in expected.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(
                f"{flag} {folder}: {name} {what}, it had {size} when it was saved; choose another checkpoint"
            )
    found_sums = _checksums(folder)
    for name, (_, total) in expected.items():
        if found_sums[name][1] != total:
            raise ValueError(f"{flag} {folder}: {name} is damaged (checksum differs); choose another checkpoint")
    return sum(size for size, _ in expected.values())


def _read_checksums(folder: Path, flag: str) -> dict[str, tuple[int, str]]:
    """Path -> (bytes, sum), as `_checksums` gave it when the checkpoint was saved; of all files that it is made of."""
    where = f"{flag} {folder}"
    expected: dict[str, tuple[int, str]] = {}
    for name, entry in _read_object(where, folder / CHECKSUMS).items():
        match entry:
            case [int(size), str(total)] if size >= 0 and type(size) is int and _SUM.fullmatch(total):
                expected[name] = size, total
            case _:
                rule = "[bytes, sum of 8 hexadecimal digits]"
                raise ValueError(f"{where}: {CHECKSUMS}: {name!r} must have {rule}, got {_shown(entry)}")
        if name == CHECKSUMS or not all(part not in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{where}: {CHECKSUMS} must name files of the checkpoint, got {name!r}")
    model = sorted(path for path in (folder / "model").rglob("*") if path.is_file())
    hidden = [path for path in model if path.name.startswith(".") and path.name != ".metadata"]  # .nfs…, .DS_Store
    for path in (folder / "meta.json", *(path for path in model if path not in hidden)):
        if (name := str(path.relative_to(folder))) not in expected:
            raise ValueError(f"{where}: {CHECKSUMS} must name every file of the checkpoint, but {name} is not in it")
    return expected


def find_model_folder(path: Path, flag: str = "--load") -> tuple[Path, Path | None]:
    """(folder of the torch_dist files, Hugging Face folder that goes with them) of a checkpoint, however it is named.

    Its files are read and compared with their checksums, where it has any.

    Raises:
        ValueError: there is none, or a file of it is damaged.
    """
    if not path.is_dir():
        raise ValueError(f"{flag} {path}: must be a folder that exists")
    if (path / "metadata.json").is_file():
        path = path.resolve()
        if path.name != "model" or not any((path.parent / name).is_file() for name in ("meta.json", CHECKSUMS)):
            return path, None
        read_meta(path.parent, flag)  # one that has lost it is no checkpoint any more
        path = path.parent
    folder, meta = find_checkpoint(path, flag)
    verify(folder, flag)
    if (folder / "hf" / "config.json").is_file():
        return folder / "model", folder / "hf"
    known = Path(meta.hf_checkpoint) if meta.hf_checkpoint else None
    return folder / "model", known if known is not None and known.is_dir() else None


def read_model_config(hf_path: str) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ValueError: it cannot be read, or is no JSON object.
    """
    return _read_object(hf_path, Path(hf_path) / "config.json")


def model_identity(hf_path: str) -> tuple[str, str]:
    """(model type, shape) of a Hugging Face folder, to refuse a checkpoint of another model."""
    raw = read_model_config(hf_path)
    shape = "x".join(str(raw.get(key)) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    return str(raw.get("model_type")), shape


def _checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """Path -> (bytes, sum) of every file but the checksums themselves; several files at a time."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip((str(p.relative_to(folder)) for p in files), pool.map(_checksum, files), strict=True))


def _checksum(file: Path) -> tuple[int, str]:
    """CRC-32: finds damage, not deceit."""
    total, size = 0, 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(_BLOCK_BYTES):
            total, size = zlib.crc32(block, total), size + len(block)
    return size, f"{total:08x}"


def _sync_tree(folder: Path) -> None:
    """fsync every file and folder, so that the rename cannot overtake the contents."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_atomic(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    _sync(path.parent)
