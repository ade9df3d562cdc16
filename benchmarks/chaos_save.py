"""Kill -9 at random moments while a real trainer saves: the newest checkpoint is always whole and can be loaded.

    python benchmarks/chaos_save.py [--kills 50] [--seed 0] [--folder DIR]

Each round forks a process that loads the newest checkpoint after checking its sums (or begins), then trains and saves
step after step, in the background every second time, and kills it at a random moment of a save. Then every file of the
newest checkpoint is read back and compared with its sum, and every tensor is read. A checkpoint that was reported as
saved must not be lost. At the end the same with files that may not grow beyond a small size, as on a full disk: the
save must fail by name, and the checkpoint before it must be whole. Last line: `kills=… unreadable=…`; exit code 1
unless the latter is 0.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, only_worker
from slime_rl.cluster.checkpoint import find_checkpoint, verify
from slime_rl.trainer.torch_dist import TorchDistReader

KEEP = 2
MAX_SAVES = 40  # of one process; it is killed long before
REPORT_TIMEOUT_S = 300.0


class Buffer:
    """A buffer whose state is a small file."""

    def save(self, path: str) -> None:
        Path(path).write_text("{}")


def trainer(folder: Path, report: int, limit_bytes: int | None) -> None:
    """The process that is killed: load, then train and save, and say so in one line each."""
    from slime_rl.cluster.saver import Saver
    from slime_rl.cluster.train_actors import TrainActor

    def say(line: str) -> None:
        os.write(report, f"{line}\n".encode())

    config = make_config(folder / "model")
    actor = TrainActor(config, 0, 1, None)  # a run's train worker without Ray around it
    worker = actor.worker = only_worker(config)
    step = 0
    if (folder / "checkpoints" / "latest").is_file():
        newest, meta = find_checkpoint(folder / "checkpoints")
        verify(newest)
        step = worker.load(newest / "model")["step"]
        assert step == meta.step, f"{newest} holds step {step}"
    say(f"loaded {step}")
    flags = ("--save", str(folder / "checkpoints"), "--keep-checkpoints", str(KEEP))
    savers = [Saver(make_config(folder / "model", *flags, *more), actor, Buffer()) for more in ((), ("--async-save",))]
    if limit_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond it is an OSError then
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    for step in range(step + 1, step + 1 + MAX_SAVES):  # noqa: B020 (goes on from what was loaded)
        worker.train(step, make_batch(step))
        say(f"saving {step}")
        saver = savers[step % 2]
        saver.save(step)
        saver.publish()
        saver.wait()
        say(f"saved {step}")


class Child:
    """A forked trainer and its lines."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(read)
                trainer(folder, write, limit_bytes)
                code = 0
            except BaseException:
                text = "".join(traceback.format_exc().splitlines()[-1:])
                os.write(write, f"failed {text}\n".encode())
            finally:
                os._exit(code)
        os.close(write)
        self._pipe, self._rest = read, b""
        self.lines: list[str] = []

    def wait_for(self, word: str) -> str:
        """The next line that starts with `word`, or with `failed`.

        Raises:
            RuntimeError: the process said nothing for long, or ended.
        """
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while time.monotonic() < deadline:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.lines.append(line.decode())
                if self.lines[-1].startswith((word, "failed")):
                    return self.lines[-1]
            if select.select([self._pipe], [], [], 1.0)[0]:
                data = os.read(self._pipe, 4096)
                if not data:
                    break
                self._rest += data
        raise RuntimeError(f"the trainer ended or hung before {word!r}; it said {self.lines[-3:]}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        while data := os.read(self._pipe, 4096):
            self._rest += data
        self.lines += self._rest.decode().splitlines()
        os.close(self._pipe)

    @property
    def last_saved(self) -> int:
        return max((int(line.split()[1]) for line in self.lines if line.startswith("saved ")), default=0)


def problem_with(root: Path, at_least: int) -> str | None:
    """What is wrong with the newest checkpoint; None when it is whole and of step `at_least` or a later one."""
    if at_least == 0 and not (root / "latest").is_file():
        return None  # killed before the first one
    try:
        newest, meta = find_checkpoint(root)
        verify(newest)
        reader = TorchDistReader(newest / "model")
        for key in reader.keys:
            reader.read(key)
        reader.close()
    except (ValueError, OSError) as error:
        return str(error)
    return None if meta.step >= at_least else f"step {meta.step} is the newest, but {at_least} was saved"


def run_kills(folder: Path, kills: int, chance: random.Random) -> list[str]:
    """Kill that many trainers; the problems found."""
    problems: list[str] = []
    saved, save_s = 0, 0.3
    for number in range(kills):
        child = Child(folder)
        line = child.wait_for("saving")
        for _ in range(chance.randrange(2)):  # sometimes the second save of a process
            start = time.monotonic()
            child.wait_for("saved")
            save_s = 0.5 * save_s + 0.5 * (time.monotonic() - start)
            line = child.wait_for("saving")
        if line.startswith("failed"):
            problems.append(line)
        time.sleep(chance.random() * 1.3 * save_s)
        child.kill()
        saved = max(saved, child.last_saved)
        problem = problem_with(folder / "checkpoints", saved)
        if problem is not None:
            problems.append(problem)
        print(f"kill {number + 1}: step {saved} saved before, {problem or 'newest is whole'}", flush=True)
    return problems


def run_full_disk(folder: Path) -> list[str]:
    """Save with files that may not grow to their size; the problems found."""
    newest, meta = find_checkpoint(folder / "checkpoints")
    largest = max(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    child = Child(folder, limit_bytes=largest // 2)
    line = child.wait_for("saved")
    child.kill()
    problem = problem_with(folder / "checkpoints", meta.step)
    print(f"full disk: {line}; {problem or 'newest is whole'}", flush=True)
    return [text for text in (problem, None if line.startswith("failed") else "a save beyond the limit passed") if text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder when not given")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    folder = Path(tempfile.mkdtemp(prefix="chaos_save.", dir=args.folder))
    try:
        make_tiny_model(folder / "model")
        problems = run_kills(folder, args.kills, random.Random(args.seed)) + run_full_disk(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(f"kills={args.kills} unreadable={len(problems)}")
    return 1 if problems else 0


def make_tiny_model(path: Path) -> None:
    """In a process of its own, so that this one has no threads when it forks."""
    pid = os.fork()
    if pid == 0:
        options: dict[str, Any] = {"num_hidden_layers": 2}
        make_checkpoint(path, "qwen3", **options)
        os._exit(0)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
