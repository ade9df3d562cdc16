"""Twenty steps of SFT, GRPO and PPO on fixed data: one worker in this process, one thread, no engine.

python tests/golden/curves.py     write the curves anew, after a change of the numbers that is meant

A curve is exact on one machine: a rerun gives the same bits. Another processor may sum in another order, which twenty
steps of training turn into a few parts in a million; TOLERANCE is what the stored curves are compared with.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent.parent))

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker  # noqa: E402

STEPS = 20
TOLERANCE = {"rel": 1e-4, "abs": 1e-5}  # of every number
# With Adam's usual 1e-8 a gradient that is nothing but rounding becomes a whole step.
COMMON = ("--adam-eps", "1e-5", "--lr", "1e-3", "--lr-decay-style", "cosine", "--num-steps", str(STEPS))
CURVES: dict[str, tuple[str, ...]] = {
    "sft": ("--loss", "sft"),
    "grpo": (
        *("--num-updates-per-rollout", "2", "--eps-clip-high", "0.28", "--entropy-coef", "0.01"),
        *("--use-kl-loss", "--kl-loss-coef", "0.1", "--off-policy-correction", "tis_token"),
    ),
    "ppo": (
        *("--advantage-estimator", "gae", "--gamma", "0.99", "--lambd", "0.95", "--normalize-advantages"),
        *("--critic-lr", "3e-3", "--critic-warmup-steps", "2", "--kl-coef", "0.05", "--num-epochs-per-rollout", "2"),
    ),
}
WATCHED = ("train/loss", "train/grad_norm", "train/value_loss", "critic/grad_norm", "train/kl_loss", "train/entropy")


def run_curve(name: str, steps: int = STEPS) -> list[dict[str, float]]:
    """The watched metrics of the first `steps` of the run."""
    groups, samples = (12, 1) if name == "sft" else (4, 3)
    updates = 2 if name == "grpo" else 1
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), num_hidden_layers=2)
        config = make_config(Path(folder), *COMMON, *CURVES[name], groups=groups, samples=samples)
        with open_worker(config) as worker:
            lines = []
            for step in range(steps):
                # Three batches in turn, so that supervised training has something to learn by heart.
                batch = make_batch(step % 3, groups=groups, samples=samples, updates=updates)
                metrics = worker.train(step, batch)
                lines.append({key: metrics[key] for key in WATCHED if key in metrics})
            return lines


def read_curve(name: str) -> list[dict[str, float]]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in CURVES:
        lines = ",\n".join(f"  {json.dumps(line)}" for line in run_curve(name))
        (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(f"written: {FOLDER / name}.json")


if __name__ == "__main__":
    main()
