"""Does host memory grow? Many small steps of the whole loop, the memory of its process tree read along the way.

    python benchmarks/soak.py --steps 300 [-- FURTHER FLAGS]

Memory is the proportional size (PSS) of the driver and all its children, read several times a second, by process.
The first half of the steps is warm-up (allocators, caches, imports that come late) and left out. The rest is cut into
blocks of equally many readings; the slope is a least-squares line through the means of the blocks. Its standard error
is that of the means: neighbouring readings are much alike, so that they would promise more than they know. Last
line: `rss_slope_mib_per_100_steps=…`, the slope by process above.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.observability.memory import measure_process, process_tree
from tools.make_quickstart import main as make_quickstart

MIB = 1024**2
PAUSE_S = 0.2
BLOCKS = 8
SHOWN_MIB = 0.2  # slopes below it have no line of their own


@dataclass(frozen=True)
class Reading:
    """Memory of every process at one moment of the run."""

    steps: int  # finished
    mib: dict[str, float]  # by process, "name (pid)"

    @property
    def total(self) -> float:
        return sum(self.mib.values())


def command_of(data: Path, run: Path, steps: int, flags: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "slime_rl.train", "--hf-checkpoint", str(data / "model"), "--run-dir", str(run)),
        *("--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact", "--num-steps", str(steps)),
        *("--max-prompt-len", "32", "--max-response-len", "6", "--device", "cpu", "--lr", "1e-4"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
        *flags,
    ]


def finished_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.exists() else 0


def name_of(process: psutil.Process) -> str:
    """What it runs, shortly: a title as Ray and SGLang set it, or program and module or script."""
    title = process.cmdline()
    if title and (len(title) == 1 or title[0].startswith("ray::")):
        return title[0].partition(".")[0].strip()[:40]  # Ray adds the method that an actor is in
    program = Path(title[0]).name if title else process.name()
    what = [part for part in title[1:] if part not in ("-m", "-u", "-c") and not part.startswith("-X")]
    return f"{program} {Path(what[0]).name if what else ''}"[:40].strip()


def read_tree(pid: int, steps: int) -> Reading:
    sizes = {}
    for process in process_tree(pid):
        try:
            sizes[f"{name_of(process)} ({process.pid})"] = measure_process(process) / MIB
        except psutil.NoSuchProcess:
            continue
    return Reading(steps, sizes)


def watch(process: subprocess.Popen[bytes], run: Path) -> list[Reading]:
    """A reading about every PAUSE_S until the run ends."""
    readings = []
    while process.poll() is None:
        steps = finished_steps(run)
        if steps:
            readings.append(read_tree(process.pid, steps))
        time.sleep(PAUSE_S)
    return readings


def slope(steps: list[int], values: list[float]) -> tuple[float, float]:
    """(MiB per 100 steps, its standard error) of a line through the means of BLOCKS blocks."""
    x, y = ([float(part.mean()) for part in np.array_split(np.array(v, dtype=float), BLOCKS)] for v in (steps, values))
    (gradient, _), covariance = np.polyfit(x, y, 1, cov=True)
    return 100 * float(gradient), 100 * float(np.sqrt(covariance[0, 0]))


def report(readings: list[Reading], late: list[Reading]) -> None:
    steps = [reading.steps for reading in late]
    first, last = readings[0], late[-1]
    print(
        f"{len(readings)} readings; {first.total:.0f} MiB at step {first.steps}, {late[0].total:.0f} at step "
        f"{late[0].steps}, {last.total:.0f} at step {last.steps}"
    )
    seen = Counter(name for reading in late for name in reading.mib)
    for name, count in sorted(seen.items()):
        if count < len(late):
            print(
                f"  {name}: there in {count} of {len(late)} readings, {max(r.mib.get(name, 0.0) for r in late):.0f} MiB"
            )
            continue
        gradient, error = slope(steps, [reading.mib[name] for reading in late])
        if abs(gradient) >= SHOWN_MIB:
            print(f"  {name}: {last.mib[name]:.0f} MiB, {gradient:+.1f} ± {error:.1f} MiB per 100 steps")
    gradient, error = slope(steps, [reading.total for reading in late])
    print(f"standard error of the slope: {error:.2f}")
    print(f"rss_slope_mib_per_100_steps={gradient:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("flags", nargs="*", help="further flags of slime_rl.train, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data, run = Path(name) / "data", Path(name) / "run"
        make_quickstart(["--output", str(data)])
        with (Path(name) / "log").open("w") as log:
            process = subprocess.Popen(command_of(data, run, args.steps, args.flags), stdout=log, stderr=log)
        try:
            readings = watch(process, run)
        finally:
            process.kill()
        if process.returncode != 0:
            print((Path(name) / "log").read_text()[-3000:], file=sys.stderr)
            return 1
    # The last step is left out: processes end while they are read.
    late = [reading for reading in readings if args.steps / 2 <= reading.steps < args.steps]
    if len(late) < 2 * BLOCKS:
        print(f"only {len(late)} readings in the second half, {2 * BLOCKS} are needed: more --steps", file=sys.stderr)
        return 1
    report(readings, late)
    return 0


if __name__ == "__main__":
    sys.exit(main())
