"""Loss, gradient norm and weights after three steps, however the work is split, against one worker and one micro-batch.

    python benchmarks/invariance.py [--quick] [--markdown FILE]

Groups of 1, 2 and 4 gloo workers train a small random Qwen3 (and Qwen3-MoE for expert parallelism) in float32, with two
updates per step. Every split is run with every aggregation, with policy, KL and entropy terms, and as PPO with a critic
(value loss, KL in the rewards too). Prints Markdown tables, which go to FILE as well, and last
`configs=… max_rel_diff=…`: the largest relative difference of any loss term, gradient norm and weight.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trainer_cases import (
    Job,
    Outcome,
    make_batch,
    make_checkpoint,
    make_config,
    relative_difference,
    run_jobs,
)

STEPS = 3
TERMS = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01", "--num-updates-per-rollout", "2")
# With Adam's usual 1e-8 a gradient that is nothing but rounding becomes a whole step, in any framework.
CONDITIONED = ("--adam-eps", "1e-5")
TP2 = ("--tensor-model-parallel-size", "2")
SP = ("--sequence-parallel",)
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
VPP2 = ("--megatron-virtual-pipeline-model-parallel-size", "2")
PPO = "PPO"
OBJECTIVES = {
    "token-mean": (),
    "seq-mean-token-mean": ("--loss-aggregation", "seq-mean-token-mean"),
    "seq-mean-token-sum": ("--loss-aggregation", "seq-mean-token-sum"),
    "seq-mean-token-sum-norm": ("--loss-aggregation", "seq-mean-token-sum-norm", "--max-response-len", "64"),
    "prompt-mean-token-mean": ("--loss-aggregation", "prompt-mean-token-mean"),
    PPO: ("--advantage-estimator", "gae", "--critic-lr", "1e-3", "--kl-coef", "0.05"),
}
REFERENCE = ("--micro-batch-size", "12")  # the whole update in one micro-batch


@dataclass(frozen=True)
class Split:
    """One row of the table. `processes` counts the workers of a critic apart, too."""

    name: str
    processes: int = 1
    flags: tuple[str, ...] = ()
    model: str = "qwen3"
    shuffle: bool = False
    critics: int = 0  # of the processes

    @property
    def objectives(self) -> list[str]:
        return [PPO] if self.critics else list(OBJECTIVES)


SPLITS = [
    Split("micro-batch size 1", flags=("--micro-batch-size", "1")),
    Split("micro-batch size 2", flags=("--micro-batch-size", "2")),
    Split("micro-batch size 8", flags=("--micro-batch-size", "8")),
    Split("dynamic micro-batches"),
    Split("dynamic, samples shuffled", shuffle=True),
    Split("a prompt for every sample", flags=("--no-share-prompts",)),
    Split("full recompute", flags=("--recompute-activations",)),
    Split("DP2", 2),
    Split("DP2, samples shuffled", 2, shuffle=True),
    Split("TP2", 2, TP2),
    Split("TP2 + sequence parallel", 2, TP2 + SP),
    Split("PP2", 2, PP2),
    Split("PP2, interleaved", 2, PP2 + VPP2),
    Split("CP2", 2, CP2),
    Split("MoE, EP2", 2, EP2, "qwen3_moe"),
    Split("critic apart: policy 1, critic 1", 2, ("--critic-num-workers", "1"), critics=1),
]
SPLITS_OF_FOUR = [
    Split("TP2 x PP2", 4, TP2 + PP2),
    Split("TP2 x CP2", 4, TP2 + SP + CP2),
    Split("DP2 x PP2", 4, PP2),
    Split("DP2 x TP2", 4, TP2),
    Split("MoE, TP2 x EP2", 4, TP2 + SP + EP2, "qwen3_moe"),
    Split(
        "critic apart: policy DP2, critic TP2",
        4,
        ("--critic-num-workers", "2", "--critic-tensor-model-parallel-size", "2"),
        critics=2,
    ),
]
Key = tuple[str, str]  # (name of the split, or model of a reference; objective)


def make_job(folder: Path, split: Split, objective: str) -> Job:
    reference = ("--ref-load", str(folder / f"{split.model}-reference"))
    flags = (*TERMS, *CONDITIONED, *reference, *OBJECTIVES[objective], *split.flags)
    config = make_config(folder / split.model, *flags, workers=split.processes - split.critics)
    return Job(config, [make_batch(step, updates=2) for step in range(STEPS)], split.shuffle)


def run_splits(splits: list[Split], objectives: list[str], folder: Path) -> dict[Key, Outcome]:
    """The outcome of every split, and of the one worker of its model, with every objective."""
    models = list(dict.fromkeys(split.model for split in splits))
    for model in models:
        make_checkpoint(folder / model, model)
        make_checkpoint(folder / f"{model}-reference", model, seed=1)
    wanted = [Split(model, flags=REFERENCE, model=model) for model in models] + splits
    outcomes: dict[Key, Outcome] = {}
    for processes in sorted({split.processes for split in wanted}):
        chosen = [(s, o) for s in wanted if s.processes == processes for o in s.objectives if o in objectives]
        jobs = [make_job(folder, split, objective) for split, objective in chosen]
        keys = [(split.name, objective) for split, objective in chosen]
        outcomes |= zip(keys, run_jobs(jobs, processes), strict=True)
    return outcomes


def make_tables(splits: list[Split], objectives: list[str], outcomes: dict[Key, Outcome]) -> tuple[str, float]:
    """(Markdown, largest difference of any row)."""
    lines = ["| one worker, one micro-batch, after 3 steps | loss | gradient norm |", "|---|---|---|"]
    for (name, objective), outcome in outcomes.items():
        if name in {split.model for split in splits}:
            last = outcome.metrics[-1]
            lines.append(f"| {name}, {objective} | {last['train/loss']:.8f} | {last['train/grad_norm']:.6f} |")
    lines += [
        "",
        f"| max relative difference | workers | {' | '.join(objectives)} |",
        "|---" * (len(objectives) + 2) + "|",
    ]
    worst = 0.0
    for split in splits:
        cells = []
        for objective in objectives:
            outcome = outcomes.get((split.name, objective))
            difference = relative_difference(outcome, outcomes[split.model, objective]) if outcome else None
            worst = max(worst, difference or 0.0)
            cells.append("-" if difference is None else f"{difference:.1e}")
        lines.append(f"| {split.name} | {split.processes} | {' | '.join(cells)} |")
    return "\n".join(lines), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no groups of four workers, token-mean and PPO alone")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here, too")
    arguments = parser.parse_args()
    splits = SPLITS if arguments.quick else SPLITS + SPLITS_OF_FOUR
    objectives = ["token-mean", PPO] if arguments.quick else list(OBJECTIVES)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_splits(splits, objectives, Path(folder))
    table, worst = make_tables(splits, objectives, outcomes)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s")
    print(f"configs={len(outcomes)} max_rel_diff={worst:.1e}")


if __name__ == "__main__":
    main()
