"""Does host memory grow? Many small steps of the whole loop, the memory of its process tree read along the way.

    python benchmarks/soak.py --steps 300

Memory is the proportional size (PSS) of the driver and all its children, read every two seconds. The slope is a
least-squares line over the second half of the steps, when caches are full. Last line:
`rss_slope_mib_per_100_steps=…`, with its standard error and the slope by process above.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.observability.memory import measure_tree, process_tree
from tools.make_quickstart import main as make_quickstart

MIB = 1024**2
PAUSE_S = 2.0


def command_of(data: Path, run: Path, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "slime_rl.train", "--hf-checkpoint", str(data / "model"), "--run-dir", str(run)),
        *("--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact", "--num-steps", str(steps)),
        *("--max-prompt-len", "32", "--max-response-len", "6", "--device", "cpu", "--lr", "1e-4"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    ]


def finished_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.exists() else 0


def names_of(pid: int) -> dict[str, float]:
    """Resident MiB by kind of process."""
    sizes: dict[str, float] = {}
    for process in process_tree(pid):
        try:
            name, rss = " ".join(process.cmdline()[:3])[:60] or process.name(), process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        sizes[name] = sizes.get(name, 0.0) + rss / MIB
    return sizes


def slope(steps: list[int], values: list[float]) -> tuple[float, float]:
    """(MiB per 100 steps, its standard error) of a least-squares line."""
    x, y = np.array(steps, dtype=float), np.array(values)
    (gradient, _), covariance = np.polyfit(x, y, 1, cov=True)
    return 100 * float(gradient), 100 * float(np.sqrt(covariance[0, 0]))


def watch(process: subprocess.Popen[bytes], run: Path) -> list[tuple[int, float, dict[str, float]]]:
    """(finished steps, MiB of the tree, MiB by process) until the run ends."""
    readings = []
    while process.poll() is None:
        steps = finished_steps(run)
        if steps:
            readings.append((steps, measure_tree(process.pid).pss_bytes / MIB, names_of(process.pid)))
        time.sleep(PAUSE_S)
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data, run = Path(name) / "data", Path(name) / "run"
        make_quickstart(["--output", str(data)])
        with (Path(name) / "log").open("w") as log:
            process = subprocess.Popen(command_of(data, run, args.steps), stdout=log, stderr=log)
        try:
            readings = watch(process, run)
        finally:
            process.kill()
        if process.returncode != 0:
            print((Path(name) / "log").read_text()[-3000:], file=sys.stderr)
            return 1
    # The last steps are left out: processes end while they are read.
    late = [r for r in readings if args.steps / 2 <= r[0] < args.steps - 1]
    if len(late) < 10:
        print(f"only {len(late)} readings in the second half; more --steps are needed", file=sys.stderr)
        return 1
    print(f"{len(readings)} readings; {readings[0][1]:.0f} MiB at step {readings[0][0]}, {late[-1][1]:.0f} at the end")
    steps = [r[0] for r in late]
    for part in sorted(set.intersection(*(set(r[2]) for r in late))):
        gradient, error = slope(steps, [r[2][part] for r in late])
        if abs(gradient) > 0.5:
            print(f"  {part}: {gradient:+.1f} ± {error:.1f} MiB per 100 steps")
    gradient, error = slope(steps, [r[1] for r in late])
    print(f"standard error of the slope: {error:.2f}")
    print(f"rss_slope_mib_per_100_steps={gradient:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
