"""Loss, gradient norm and weights after three steps, however the work is split, against one worker and one micro-batch.

    python benchmarks/invariance.py [--quick]

Prints a Markdown table and, last, `configs=… max_rel_diff=…`. Groups of 1, 2 and 4 gloo workers train a small random
Qwen3 (and Qwen3-MoE for expert parallelism) in float32 with policy, KL and entropy terms and two updates per step; the
PPO rows add a critic, its loss and its gradient norm.
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
AGGREGATIONS = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
)


@dataclass(frozen=True)
class Case:
    """One row of the table; `base` names the row it is compared with."""

    name: str
    workers: int = 1
    flags: tuple[str, ...] = ()
    base: str = "one worker, one micro-batch"
    model: str = "qwen3"
    shuffle: bool = False


WHOLE = ("--micro-batch-size", "12")
MOE_BASE = "MoE, one worker"
PPO_BASE = "PPO with a critic, one worker"
PPO = ("--advantage-estimator", "gae", "--critic-lr", "1e-3")


def make_cases(quick: bool) -> list[Case]:
    cases = [
        Case("one worker, one micro-batch", flags=WHOLE),
        Case("micro-batch size 1", flags=("--micro-batch-size", "1")),
        Case("micro-batch size 2", flags=("--micro-batch-size", "2")),
        Case("micro-batch size 8", flags=("--micro-batch-size", "8")),
        Case("dynamic micro-batches"),
        Case("dynamic, samples shuffled", shuffle=True),
        Case("full recompute", flags=("--recompute-activations",)),
        Case("DP2", 2),
        Case("DP2, samples shuffled", 2, shuffle=True),
        Case("TP2", 2, TP2),
        Case("TP2 + sequence parallel", 2, TP2 + SP),
        Case("PP2", 2, PP2),
        Case("PP2, interleaved", 2, PP2 + VPP2),
        Case("CP2", 2, CP2),
        Case(PPO_BASE, flags=PPO + WHOLE, base=PPO_BASE),
        Case(MOE_BASE, flags=WHOLE, base=MOE_BASE, model="qwen3_moe"),
        Case("MoE, EP2", 2, EP2, MOE_BASE, "qwen3_moe"),
    ]
    for aggregation in AGGREGATIONS:
        flag = ("--loss-aggregation", aggregation)
        base = f"{aggregation}, one worker"
        cases.append(Case(base, flags=flag + WHOLE, base=base))
        cases.append(Case(f"{aggregation}, micro-batch size 1", flags=(*flag, "--micro-batch-size", "1"), base=base))
        cases.append(Case(f"{aggregation}, DP2", 2, flag, base))
    for name, workers, flags in (
        ("micro-batch size 1", 1, ("--micro-batch-size", "1")),
        ("DP2", 2, ()),
        ("TP2 + sequence parallel", 2, TP2 + SP),
        ("TP2", 2, TP2),
        ("PP2", 2, PP2),
        ("PP2, interleaved", 2, PP2 + VPP2),
        ("CP2", 2, CP2),
    ):
        cases.append(Case(f"PPO, {name}", workers, PPO + flags, PPO_BASE))
    if not quick:
        cases += [
            Case("TP2 x PP2", 4, TP2 + PP2),
            Case("TP2 x CP2", 4, TP2 + SP + CP2),
            Case("DP2 x PP2", 4, PP2),
            Case("DP2 x TP2", 4, TP2),
            Case("MoE, TP2 x EP2", 4, TP2 + SP + EP2, MOE_BASE, "qwen3_moe"),
        ]
    return cases


def run_cases(cases: list[Case], folder: Path) -> dict[str, Outcome]:
    for kind in {case.model for case in cases}:
        make_checkpoint(folder / kind, kind)
        make_checkpoint(folder / f"{kind}-reference", kind, seed=1)
    batches = [make_batch(step, updates=2) for step in range(STEPS)]
    outcomes: dict[str, Outcome] = {}
    for workers in sorted({case.workers for case in cases}):
        chosen = [case for case in cases if case.workers == workers]
        jobs = []
        for case in chosen:
            reference = ("--ref-load", str(folder / f"{case.model}-reference"))
            flags = (*TERMS, *CONDITIONED, *reference, *case.flags)
            jobs.append(Job(make_config(folder / case.model, *flags, workers=workers), batches, case.shuffle))
        outcomes |= zip((case.name for case in chosen), run_jobs(jobs, workers), strict=True)
    return outcomes


def print_table(cases: list[Case], outcomes: dict[str, Outcome]) -> float:
    """The largest difference of any row."""
    worst = 0.0
    print("| configuration | workers | loss after 3 steps | gradient norm | max relative difference |")
    print("|---|---|---|---|---|")
    for case in cases:
        difference = relative_difference(outcomes[case.name], outcomes[case.base])
        worst = max(worst, difference)
        last = outcomes[case.name].metrics[-1]
        shown = "(reference)" if case.name in {case.base for case in cases} else f"{difference:.1e}"
        print(f"| {case.name} | {case.workers} | {last['train/loss']:.8f} | {last['train/grad_norm']:.6f} | {shown} |")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the groups of four workers")
    cases = make_cases(parser.parse_args().quick)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_cases(cases, Path(folder))
    worst = print_table(cases, outcomes)
    print(f"\n{time.perf_counter() - start:.0f} s")
    print(f"configs={len(cases)} max_rel_diff={worst:.1e}")


if __name__ == "__main__":
    main()
