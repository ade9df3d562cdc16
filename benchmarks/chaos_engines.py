"""Break a real run again and again: does it lose or repeat a prompt, train on stale tokens, leave anything behind?

    python benchmarks/chaos_engines.py --faults 100 --seed N [--faults-per-run 25] [--undisturbed]

Every run is `slime_rl.train` on the CPU with the tiny model, two engines and a train worker; health checks are quick.
While it trains, engine mains, schedulers, supervisors, the router and the train worker are killed or stopped at random,
engines are held up for a while (slow answers), all connections of the router or of an engine are cut, and the router's
port is taken while it is down. The run must end by itself with all its steps. Last line, over all runs:
`faults=… lost=… twice=… stale_tokens=… left_over=…`; exit code 1 unless all but the first are 0.

lost and twice count prompt groups against the order that an undisturbed run trains them in; stale are tokens that
another version sampled than the one that the step starts from; left over are processes, files in /dev/shm and temporary
files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.config import Config
from slime_rl.types import Sample
from tools.make_quickstart import main as make_quickstart

BATCH, SAMPLES, RESPONSE_LEN = 4, 4, 24
HEALTH_TIMEOUT_S, TRAIN_TIMEOUT_S = 5.0, 8.0
PROGRESS_LIMIT_S = 600.0
HELD_UP_S = 1.5  # below the health timeout: slow, not dead
PORT_TAKEN_S = 2.0
STEPS_PER_FAULT = 2.0  # a guess for the first run; the others go by what it took
UNDISTURBED_STEPS = 60
SPARE_STEPS = 6
PIDFD_GETFD = 438  # the system call; Python has no name for it


async def share_of_digits(config: Config, group: list[Sample]) -> list[float]:
    """A reward that the tiny model learns within a few steps."""
    return [sum(c.isdigit() for c in sample.response) / max(1, sample.response_length) for sample in group]


@dataclass
class ChaosRun:
    """One training run, its processes, and what it has logged."""

    folder: Path
    data: Path
    num_steps: int
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    known: dict[int, psutil.Process] = field(default_factory=dict)  # by pid, ended ones included

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="c_", dir="/tmp"))  # short: Ray's sockets lie below it
        self.shared_before = set(os.listdir("/dev/shm"))
        flags = [
            *("--hf-checkpoint", str(self.data / "model"), "--prompt-data", str(self.data / "train.jsonl")),
            *("--reward-function-path", f"{Path(__file__).stem}:share_of_digits", "--max-prompt-len", "32"),
            *("--max-response-len", str(RESPONSE_LEN), "--rollout-batch-size", str(BATCH), "--lr", "2e-3"),
            *("--n-samples-per-prompt", str(SAMPLES), "--rollout-num-engines", "2", "--device", "cpu"),
            *("--num-steps", str(self.num_steps), "--save-interval", "1", "--keep-checkpoints", "2"),
            *("--log-samples", str(BATCH * SAMPLES), "--run-dir", str(self.run_dir)),
            *("--engine-health-interval-s", "0.5", "--engine-health-timeout-s", str(HEALTH_TIMEOUT_S)),
            *("--train-health-timeout-s", str(TRAIN_TIMEOUT_S), "--max-engine-restarts", "1000"),
            *("--max-restarts", "1000"),
        ]
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self.temporary)}
        environment["SLIME_RL_CHAOS"] = self.marker
        with (self.folder / "log").open("w") as log:
            command = [sys.executable, "-m", "slime_rl.train", *flags]
            self.driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> ChaosRun:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Every live process of this run: those with its mark in the environment, what is below them (a new process
        title overwrites the environment), and those seen before."""
        alive = {process.pid: process for process in psutil.process_iter(["environ", "ppid", "status"])}
        info = {pid: process.info for pid, process in alive.items()}  # type: ignore[attr-defined]
        found = {pid for pid in alive if (info[pid]["environ"] or {}).get("SLIME_RL_CHAOS") == self.marker}
        found |= {pid for pid, process in self.known.items() if alive.get(pid) == process}
        while more := {pid for pid in alive if info[pid]["ppid"] in found} - found:
            found |= more
        self.known |= {pid: alive[pid] for pid in found}
        return [alive[pid] for pid in found if info[pid]["status"] != psutil.STATUS_ZOMBIE]

    def find(self, part: str) -> list[psutil.Process]:
        """Live processes of a part: engine, scheduler, supervisor, router or trainer."""
        found = []
        for process in self.processes():
            try:
                line, parent = process.cmdline(), process.parent()
                above = parent.cmdline() if parent is not None else []
            except psutil.Error:
                continue  # ended while we looked
            is_supervisor = any(word.endswith("supervise.py") for word in line)
            below_supervisor = any(word.endswith("supervise.py") for word in above)
            kinds = {
                "engine": below_supervisor and "slime_rl.engine.launch_engine" in line,
                "scheduler": any("sglang::scheduler" in word for word in line),
                "supervisor": is_supervisor and "slime_rl.engine.launch_engine" in line,
                "router": below_supervisor and "slime_rl.engine.launch_router" in line,
                "trainer": any(word.startswith("ray::TrainActor") for word in line),
            }
            if kinds[part]:
                found.append(process)
        return found

    def steps(self) -> int:
        """Training steps in the metrics (fewer after a train worker's restart)."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"train/loss"') if path.exists() else 0

    def fault_lines(self) -> list[str]:
        path = self.run_dir / "logs" / "faults.log"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Return when the condition holds or the run has ended."""
        deadline = time.monotonic() + PROGRESS_LIMIT_S
        while not condition() and self.driver.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not happen within {PROGRESS_LIMIT_S:g} s; see {self.folder}")
            time.sleep(0.1)

    def left_over(self) -> list[str]:
        """What is still there after the end, given a moment to go."""
        deadline = time.monotonic() + 60
        while True:
            left = []
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends while we look
                    left.append(f"process {process.pid} {' '.join(process.cmdline()[:4])}")
            left += [f"temporary {path.name}" for path in self.temporary.iterdir()]
            own = tuple(f"torch_{pid}_" for pid in self.known)
            new = set(os.listdir("/dev/shm")) - self.shared_before
            left += [f"shared {name}" for name in new if name.startswith((*own, "sglang_loads_"))]
            if not left or time.monotonic() > deadline:
                shutil.rmtree(self.temporary, ignore_errors=True)
                return left
            time.sleep(0.5)


def take_the_routers_port(router: psutil.Process) -> None:
    port = int(next(word.split("=")[1] for word in router.cmdline() if word.startswith("--port=")))
    router.kill()
    deadline = time.monotonic() + 5
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while time.monotonic() < deadline:
            try:
                squatter.bind(("127.0.0.1", port))
            except OSError:
                continue  # the dying router, or already its successor, still has it
            squatter.listen()
            time.sleep(PORT_TAKEN_S)
            return


def cut_connections(process: psutil.Process) -> None:
    """Shut down every TCP connection of a process, as a network between it and the others would."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(process.pid)
    try:
        for connection in process.net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED:
                continue
            descriptor = libc.syscall(PIDFD_GETFD, pidfd, connection.fd, 0)
            if descriptor < 0 and ctypes.get_errno() == errno.EBADF:
                continue  # closed since we looked
            if descriptor < 0:
                raise SystemExit(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}; may this user trace processes?")
            with socket.socket(fileno=descriptor) as own_copy, contextlib.suppress(OSError):  # closed meanwhile
                own_copy.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)


def hold_up(process: psutil.Process) -> None:
    process.suspend()
    time.sleep(HELD_UP_S)
    process.resume()


# name -> (part, what is done to it, how the log names it when it is noticed; None: it need not be)
FAULTS: dict[str, tuple[str, Callable[[psutil.Process], Any], str | None]] = {
    "kill engine": ("engine", psutil.Process.kill, "engine"),
    "stop engine": ("engine", psutil.Process.suspend, "engine"),
    "kill scheduler": ("scheduler", psutil.Process.kill, "engine"),
    "stop scheduler": ("scheduler", psutil.Process.suspend, "engine"),
    "kill supervisor": ("supervisor", psutil.Process.kill, "engine"),
    "slow engine": ("engine", hold_up, None),
    "slow scheduler": ("scheduler", hold_up, None),
    "cut engine's connections": ("engine", cut_connections, None),
    "kill router": ("router", psutil.Process.kill, "the router"),
    "stop router": ("router", psutil.Process.suspend, "the router"),
    "cut router's connections": ("router", cut_connections, None),
    "take router's port": ("router", take_the_routers_port, "the router"),
    "kill trainer": ("trainer", psutil.Process.kill, "train worker"),
    "stop trainer": ("trainer", psutil.Process.suspend, "train worker"),
}


def inject(run: ChaosRun, name: str, rng: random.Random) -> float | None:
    """Do it; seconds until it was noticed, None when there is no such process now or it ended first."""
    part, action, noticed_as = FAULTS[name]
    victims = run.find(part)
    if not victims:
        return None
    before = len(run.fault_lines())
    injected = datetime.now()
    try:
        action(rng.choice(victims))
    except (psutil.Error, ProcessLookupError):
        return None
    if noticed_as is None:
        return 0.0

    def noticed() -> list[str]:
        return [line for line in run.fault_lines()[before:] if line.split(" ", 1)[1].startswith(noticed_as)]

    run.wait(lambda: bool(noticed()), f"noticing '{name}'")
    if not noticed():
        return None
    return (datetime.fromisoformat(noticed()[0].split()[0]) - injected).total_seconds()


def check(run: ChaosRun) -> tuple[int, int, int]:
    """(groups lost, groups trained more than once, stale tokens) of a finished run."""
    lines = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    trained = Counter((line["group_index"], line["step"]) for line in lines)
    per_group = Counter(group for group, _ in trained)
    lost = sum(1 for group in range(run.num_steps * BATCH) if group not in per_group)
    rows = [json.loads(row)["prompt"] for row in (run.data / "train.jsonl").read_text().splitlines()]
    of_group = {line["group_index"]: line["prompt"] for line in lines}
    prompts = Counter(str(of_group[group]) for group in per_group)
    twice = sum(count - 1 for count in per_group.values()) + sum(count - 1 for count in prompts.values())
    assert len(rows) > run.num_steps * BATCH, "more than an epoch: a prompt may come twice"
    stale = sum(line["response_length"] for line in lines if set(line["weight_versions"]) != {line["step"]})
    return lost, twice, stale


def final_reward(run: ChaosRun) -> float:
    steps = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [line["rollout/reward_mean"] for line in steps if "rollout/reward_mean" in line][-3:]
    return sum(last) / len(last)


def disturb(run: ChaosRun, num_faults: int, rng: random.Random) -> dict[str, list[float]]:
    """Break things until the run ends or `num_faults` are done; seconds to notice, by kind."""
    seconds: dict[str, list[float]] = {}
    kinds: list[str] = []
    done = 0
    while done < num_faults and run.driver.poll() is None:
        reached = run.steps()
        run.wait(lambda reached=reached: run.steps() != reached, "a step")
        time.sleep(rng.uniform(0, 0.5))
        kinds = kinds or rng.sample(sorted(FAULTS), len(FAULTS))
        name = kinds.pop()
        if (took := inject(run, name, rng)) is not None:
            seconds.setdefault(name, []).append(took)
            done += 1
            print(f"  {name}: noticed after {took:.1f} s, at step {run.steps()}", flush=True)
    return seconds


def finish(run: ChaosRun) -> tuple[Counter[str], float]:
    """Wait for the end of a run; what was wrong with it, and its reward at the end."""
    code = run.driver.wait(PROGRESS_LIMIT_S * 2)
    if code != 0:
        print((run.folder / "log").read_text()[-3000:])
        print("\n".join(run.fault_lines()[-20:]))
        raise SystemExit(f"{run.folder.name} ended with exit code {code}")
    left = run.left_over()
    if left:
        print(f"  left over: {left}")
    lost, twice, stale = check(run)
    return Counter(lost=lost, twice=twice, stale_tokens=stale, left_over=len(left)), final_reward(run)


def chaos(folder: Path, num_faults: int, per_run: int, rng: random.Random) -> Counter[str]:
    """Run after run until `num_faults` are done; the totals."""
    totals: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    started, steps_each, number = time.monotonic(), STEPS_PER_FAULT, 0
    while totals["faults"] < num_faults:
        wanted = min(per_run, num_faults - totals["faults"])
        num_steps = int(wanted * steps_each) + SPARE_STEPS
        with ChaosRun(folder / f"run {number}", folder / "data", num_steps) as run:
            seconds = disturb(run, wanted, rng)
            faults, reached = sum(map(len, seconds.values())), run.steps()
            wrong, reward = finish(run)
        # Steps go on while a fault is waited for: a run with too few ends before it has had its faults.
        steps_each = 1.2 * reached / max(1, faults)
        totals += wrong + Counter(faults=faults)
        number += 1
        slowest |= {kind: max([slowest.get(kind, 0.0), *took]) for kind, took in seconds.items()}
        each = (time.monotonic() - started) / max(1, totals["faults"])
        print(f"{run.folder.name}: {faults} faults in {num_steps} steps, {each:.1f} s a fault so far, wrong: "
              f"{dict(+wrong) or 'nothing'}, reward at the end {reward:.3f}", flush=True)  # fmt: skip
    for kind, took in sorted(slowest.items()):
        print(f"{kind}: noticed within {took:.1f} s")
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults-per-run", type=int, default=25)
    parser.add_argument("--undisturbed", action="store_true", help="also train without faults and compare the reward")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))  # stays when something went wrong
    make_quickstart(["--output", str(folder / "data")])
    totals: Counter[str] = Counter()
    if args.undisturbed:
        with ChaosRun(folder / "undisturbed", folder / "data", UNDISTURBED_STEPS) as run:
            totals, reward = finish(run)
        print(f"undisturbed: reward at the end {reward:.3f}", flush=True)
    totals += chaos(folder, args.faults, args.faults_per_run, random.Random(args.seed))
    if sum(totals.values()) == totals["faults"]:
        shutil.rmtree(folder)
    print(" ".join(f"{name}={totals[name]}" for name in ("faults", "lost", "twice", "stale_tokens", "left_over")))
    return 0 if sum(totals.values()) == totals["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
