"""The quickstart, synchronous and fully asynchronous, on the real engines: accuracy over seconds.

    python benchmarks/async_vs_sync.py --model runs/quickstart-warmup/hf --data runs/quickstart-data [--steps 16]

Both runs have the flags of scripts/quickstart_stages.sh, with as many steps; the asynchronous one adds `--fully-async
--max-staleness 1 --off-policy-correction tis_token`. Writes async_vs_sync.png into --output. Seconds count from the
first evaluation, so starting up is left out. Last line: `sync_s=… async_s=… sync_accuracy=… async_accuracy=…
staleness_max=…`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.observability.tracker import METRICS_FILE, read_jsonl

ACCURACY = "eval/heldout/accuracy"
MODES = {
    "synchronous": (),
    "fully asynchronous": ("--fully-async", "--max-staleness", "1", "--off-policy-correction", "tis_token"),
}


def flags(args: argparse.Namespace, run_dir: Path) -> list[str]:
    """Of the quickstart's second stage."""
    return [
        *("--hf-checkpoint", str(args.model), "--prompt-data", str(args.data / "train.jsonl")),
        *(
            "--eval-prompt-data",
            "heldout",
            str(args.data / "heldout.jsonl"),
            "--eval-interval",
            str(args.eval_interval),
        ),
        *("--rm-type", "exact", "--max-prompt-len", "32", "--max-response-len", "6", "--seed", "1"),
        *("--rollout-batch-size", "128", "--n-samples-per-prompt", "8", "--num-updates-per-rollout", "4"),
        *("--no-grpo-std-normalization", "--eps-clip-high", "0.28", "--old-log-probs", "rollout"),
        *("--num-steps", str(args.steps), "--lr", "1e-3", "--adam-beta2", "0.95"),
        *("--run-dir", str(run_dir), "--overwrite"),
    ]


def curve(run_dir: Path) -> tuple[list[float], list[float], float]:
    """(seconds since the first evaluation, accuracies, oldest trained token in versions)."""
    lines = read_jsonl(run_dir / METRICS_FILE)
    points = [(line["time_s"], line[ACCURACY]) for line in lines if ACCURACY in line]
    oldest = max(line.get("rollout/staleness_max", 0.0) for line in lines)
    return [time - points[0][0] for time, _ in points], [accuracy for _, accuracy in points], oldest


def draw(curves: dict[str, tuple[list[float], list[float], float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, (seconds, accuracies, _) in curves.items():
        axes.plot(seconds, accuracies, marker="o", ms=4, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("held-out accuracy")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/async_vs_sync"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--eval-interval", type=int, default=4)
    args = parser.parse_args()
    curves = {}
    for name, extra in MODES.items():
        run_dir = args.output / name.split()[-1]
        command = [sys.executable, "-m", "slime_rl.train", *flags(args, run_dir), *extra]
        subprocess.run(command, check=True)
        curves[name] = curve(run_dir)
    draw(curves, args.output / "async_vs_sync.png")
    (sync_s, sync_acc, _), (async_s, async_acc, oldest) = curves.values()
    print(f"picture: {args.output / 'async_vs_sync.png'}")
    print(
        f"sync_s={sync_s[-1]:.0f} async_s={async_s[-1]:.0f} sync_accuracy={sync_acc[-1]:.3f} "
        f"async_accuracy={async_acc[-1]:.3f} staleness_max={oldest:.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
