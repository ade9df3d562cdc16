"""Where metrics go: RUN_DIR/metrics.jsonl always, other programs by flag, a few samples to RUN_DIR/samples.jsonl."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

from slime_rl.config import Config
from slime_rl.observability.external_trackers import open_trackers
from slime_rl.types import Sample

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.json"
TokenLog = Mapping[int, Mapping[str, Sequence[float | None]]]  # what trainer.token_log gives
TRAINING, EVALUATION = "training", "evaluation"  # what a logged sample is for
NO_LOG: TokenLog = MappingProxyType({})
MAX_LOGGED_TOKENS = 2048  # of a logged sample; whole ones are what --dump-rollouts is for


class Tracker(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool = False) -> None:
        """`failed`: the run has ended with an error."""
        ...


class JsonlFile:
    """A jsonl file whose lines have a `step`. A line is in it when `write` returns, whatever becomes of the process.

    With `resume_step` the file goes on, without the lines of what runs again: those of training steps from there on,
    and of evaluations after more steps. An evaluation after exactly `resume_step` steps measured the weights that the
    run continues from; `again` has the sets that are evaluated again then.
    """

    def __init__(self, path: Path, resume_step: int | None, again: Collection[str] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.kept: list[dict[str, Any]] = []
        if resume_step is not None and path.exists():
            stay = (_what_stays(line, resume_step, again) for line in read_jsonl(path))
            self.kept = [line for line in stay if line is not None]
        self._file = _rewrite(path, self.kept)

    def write(self, *lines: Mapping[str, Any]) -> None:
        self._file.write("".join(json.dumps(line, default=str) + "\n" for line in lines))
        self._file.flush()

    def to_disk(self) -> None:
        """Returns when the lines so far outlive the machine, too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class JsonlTracker:
    """One JSON object per line: `step`, `time_s` and the metrics.

    `time_s` counts seconds of running, over resumes. Values that are not finite become null, so that every line is
    valid JSON.
    """

    def __init__(self, path: Path, resume_step: int | None = None, again: Collection[str] = ()) -> None:
        """See JsonlFile."""
        self.file = JsonlFile(path, resume_step, again)
        self.kept_evaluation = [line for line in self.file.kept if line["step"] == resume_step]
        """Lines of evaluation of the weights that the run continues from."""
        self._offset_s = max((float(line.get("time_s") or 0.0) for line in self.file.kept), default=0.0)
        self._start = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        elapsed = round(self._offset_s + time.monotonic() - self._start, 3)
        values = {name: _json_number(value) for name, value in metrics.items()}
        self.file.write({"step": step, "time_s": elapsed, **values})

    def close(self, failed: bool = False) -> None:
        self.file.close()


class SampleWriter:
    """Writes `per_step` samples of every step, evenly spread over the batch, to a jsonl file."""

    def __init__(self, path: Path, per_step: int, resume_step: int | None = None, again: Collection[str] = ()) -> None:
        """See JsonlFile."""
        self.file = JsonlFile(path, resume_step, again)
        self._per_step = per_step

    def write(
        self,
        step: int,
        samples: Sequence[Sample],
        texts: Sequence[Sequence[str]] = (),
        token_log: TokenLog = NO_LOG,
        kind: str = TRAINING,
    ) -> None:
        """`texts` are the response tokens of each sample as text; without them no tokens are written.

        `token_log` has what training saw of them: position in `samples` -> kind of number -> one per token.
        """
        count, records = min(self._per_step, len(samples)), []
        for i in (k * len(samples) // count for k in range(count)):
            record = {"step": step, "kind": kind, **_sample_record(samples[i])}
            if texts:
                record |= _token_record(samples[i], texts[i])
                record.update(token_log.get(i, {}))
            records.append(record)
        self.file.write(*records)

    def close(self) -> None:
        self.file.close()


def check_tensorboard(config: Config) -> None:
    """Before anything starts.

    Raises:
        ValueError: --tensorboard without the package; says how to install it.
    """
    if config.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard")


class TensorBoardTracker:
    """TensorBoard events; on resume, points from `resume_step` on are purged, and those of `kept` written again."""

    def __init__(
        self, folder: Path, resume_step: int | None = None, kept: Sequence[Mapping[str, float | None]] = ()
    ) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(log_dir=str(folder), purge_step=resume_step)
        for line in kept:
            values = {name: value for name, value in line.items() if name.startswith("eval/") and value is not None}
            self.log(int(line["step"] or 0), values)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class Trackers:
    """All destinations of a run as one; a context manager that closes them."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        samples: SampleWriter | None = None,
        remake: Callable[[int], Trackers] | None = None,
    ) -> None:
        self._trackers = list(trackers)
        self._samples = samples
        self._remake = remake  # opens the same destinations as a resume at a step does

    def rewind(self, step: int) -> None:
        """Steps from `step` on run again: what was logged of them is dropped, as on a resume."""
        assert self._remake is not None, "only trackers of make_trackers can go back"
        self.close()
        fresh = self._remake(step)
        self._trackers, self._samples = fresh._trackers, fresh._samples

    @property
    def _files(self) -> list[JsonlFile]:
        owners = [*(t for t in self._trackers if isinstance(t, JsonlTracker)), *filter(None, [self._samples])]
        return [owner.file for owner in owners]

    def to_disk(self) -> None:
        """Returns when the lines of the files outlive the machine, too."""
        for file in self._files:
            file.to_disk()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_samples(
        self,
        step: int,
        samples: Sequence[Sample],
        texts: Sequence[Sequence[str]] = (),
        token_log: TokenLog = NO_LOG,
        kind: str = TRAINING,
    ) -> None:
        """Write some samples of a step; see SampleWriter.write."""
        if self._samples is not None:
            self._samples.write(step, samples, texts, token_log, kind)

    def close(self, failed: bool = False) -> None:
        for tracker in self._trackers:
            tracker.close(failed)
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(failed=kind is not None)


def make_trackers(config: Config, resume_step: int | None = None) -> Trackers:
    """The trackers that the flags ask for; writes RUN_DIR/config.json too.

    Args:
        config: the run's configuration.
        resume_step: first step that will run when a checkpoint was loaded; None starts new files.
    """
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder / CONFIG_FILE)
    again = {name for name, _ in config.evaluation.datasets}  # a run that goes on evaluates first
    lines = JsonlTracker(folder / METRICS_FILE, resume_step, again)
    trackers: list[Tracker] = [lines]
    if config.logging.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", resume_step, lines.kept_evaluation))
    trackers += open_trackers(config, resume=resume_step is not None)
    samples = None
    if config.logging.log_samples > 0:
        samples = SampleWriter(folder / SAMPLES_FILE, config.logging.log_samples, resume_step, again)
    return Trackers(trackers, samples, lambda step: make_trackers(config, step))


def write_config(config: Config, path: Path) -> None:
    """The whole configuration as JSON: section -> field -> value."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file. A broken last line is what a kill in the middle of a write leaves; it is left out.

    Raises:
        ValueError: any other line that is not a JSON object with a whole `step`, as file:line.
    """
    return list(_objects(path, path.read_text(encoding="utf-8", errors="replace").splitlines()))


def _objects(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(lines, 1):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number}: not JSON ({error}), got {text[:80]!r}") from error
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise ValueError(f"{path}:{number}: must be an object with a whole number `step`, got {text[:80]!r}")
        yield value


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> IO[str]:
    """Replace `path` by `lines` in one step, so that a kill leaves the old file or the new one; open it to append."""
    aside = path.with_name(path.name + ".new")
    aside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(aside, path)
    return path.open("a", encoding="utf-8")


def _what_stays(line: dict[str, Any], resume_step: int, again: Collection[str]) -> dict[str, Any] | None:
    """What of a line is not written again by a run that goes on with this step."""
    if line["step"] != resume_step:
        return line if line["step"] < resume_step else None
    if "kind" in line:  # of samples, which do not name their set
        return line if line["kind"] == EVALUATION and not again else None
    sets = {name: name.split("/")[1] for name in line if name.startswith("eval/")}
    if len(sets) + 2 < len(line):  # beside step and time_s: it is of training
        return None
    stays = {name: value for name, value in line.items() if sets.get(name) not in again}
    return stays if set(stays) & set(sets) else None


def _json_number(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _token_record(sample: Sample, texts: Sequence[str]) -> dict[str, Any]:
    """What the dashboard colours: the first MAX_LOGGED_TOKENS response tokens."""
    cut = slice(0, MAX_LOGGED_TOKENS)
    return {
        "tokens": list(texts[cut]),
        "log_probs": [_json_number(round(value, 6)) for value in sample.rollout_log_probs[cut]],
        "loss_mask": [int(value) for value in sample.loss_mask[cut]],
        "weight_versions_by_token": list(sample.weight_versions[cut]),
        "tokens_cut": sample.response_length > MAX_LOGGED_TOKENS,
    }


def _sample_record(sample: Sample) -> dict[str, Any]:
    known = [version for version in sample.weight_versions if version >= 0]
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "reward_info": sample.reward_info,
        "status": str(sample.status),
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "weight_versions": [min(known), max(known)] if known else [],
    }
