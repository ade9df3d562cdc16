"""Staleness, speed and waste of fully asynchronous production, against the synchronous loop and against the limits.

    python benchmarks/async_simulation.py [--steps 200] [--seed 0]

The real prompt source, ledger buffer and production code run on a scripted engine in virtual time: one token per second
in each slot, as many slots as a step has samples. Lengths are lognormal; in the long-tail workload 2 % of the samples
are 50 times longer. Training takes as long as a synchronous rollout of the workload without a tail.

Limits of the speed-up over synchronous steps (rollout R, train T, so R + T a step):

    throughput   a step needs T, and as long as the slots take for a step's tokens
    staleness    a group begun with version v trains in step v + K at the latest, so where nothing is thrown away its
                 longest sample costs (R + T) / (K + 1) a step: K + 1 times, whatever the machine
    these        the same for lengths that differ: with t(v) the time of version v and L(v) the longest sample of the
    lengths      groups begun with it, t(v + K + 1) = max(t(v) + L(v), t(v + K)) + T. From 4000 drawn steps.

Nobody can know a length before it is sampled, and to begin long samples anew would train on fewer of them than the
policy samples, so there is no way around the last one but a larger K.

Last line: `violations=… speedup_equal=… speedup_long_tail=… wasted=…`: trained tokens older than K over all runs; the
lowest speed-up over K without a tail; the speed-up with the tail at K = 4; the largest share of wasted tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scripted_rollout import ScriptedRun, run_virtual, scripted_config

BATCH, GROUP_SIZE, MEDIAN, SIGMA = 16, 8, 30, 0.4
TAIL_SHARE, TAIL_FACTOR = 0.02, 50
BOUNDS = (1, 2, 4, 8)
DRAWN_STEPS = 4000
FIRST_PART = 10  # steps before the resume
SKIPPED = 6  # first steps, in which production has no head start yet


def lengths(seed: int, tail: bool) -> Callable[[list[int]], int]:
    rng = random.Random(seed)

    def draw(prompt: list[int]) -> int:
        factor = TAIL_FACTOR if rng.random() < TAIL_SHARE and tail else 1
        return max(1, round(factor * rng.lognormvariate(0, SIGMA) * MEDIAN))

    return draw


@dataclass(frozen=True)
class Result:
    """One run."""

    step_s: float  # virtual seconds per step
    violations: int  # trained tokens older than the bound
    oldest: int  # versions, of any trained token
    wasted: float  # share of sampled tokens
    tokens_per_step: float

    @classmethod
    def of(cls, runs: list[ScriptedRun], bound: int) -> Result:
        """From the parts of one run; ages are counted from what the engine said, not by the code under test."""
        ages: list[int] = []
        step = 0
        for run in runs:
            for groups in run.batches:
                samples = [sample for group in groups for sample in group.samples]
                ages += [step - v for s in samples for v, m in zip(s.weight_versions, s.loss_mask, strict=True) if m]
                step += 1
        ends = runs[-1].ends_s
        first = SKIPPED
        sampled = sum(run.client.num_tokens for run in runs)
        wasted = sum(metrics["rollout/wasted_tokens"] for run in runs for metrics in run.metrics)
        return cls(
            step_s=(ends[-1] - ends[first - 1]) / (len(ends) - first),
            violations=sum(age > bound for age in ages),
            oldest=max(ages),
            wasted=wasted / sampled,
            tokens_per_step=len(ages) / step,
        )


def simulate(
    args: argparse.Namespace, tail: bool, train_s: float, *flags: str, bound: int = 0, resume: bool = False
) -> Result:
    """A run of `args.steps`; with `resume`, the steps before are part of it and end with a checkpoint."""
    first_steps = FIRST_PART if resume else args.steps
    with tempfile.TemporaryDirectory() as folder:
        config = scripted_config(
            Path(folder),
            1000,
            *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", str(GROUP_SIZE)),
            *("--num-steps", str(args.steps + resume * FIRST_PART), "--rollout-concurrency", str(BATCH * GROUP_SIZE)),
            *("--rollout-num-engines", "1", "--max-response-len", "100000"),
            *flags,
        )

        async def part(start: int, steps: int, state: dict[str, Any] | None) -> ScriptedRun:
            run = ScriptedRun(config, lengths(args.seed + start, tail), train_s)
            run.client.serve(start)
            if state is not None:
                run.buffer.load_state_dict(state)
            return await run.run(start, steps)

        runs = [run_virtual(part(0, first_steps, None))]
        if resume:
            runs.append(run_virtual(part(first_steps, args.steps, runs[0].state)))
    return Result.of(runs, bound)


def longest_of_steps(seed: int, tail: bool) -> list[int]:
    """The longest sample of each of DRAWN_STEPS steps."""
    draw = lengths(seed, tail)
    return [max(draw([]) for _ in range(BATCH * GROUP_SIZE)) for _ in range(DRAWN_STEPS)]


def limit_of_lengths(longest: list[int], train_s: float, bound: int) -> float:
    """Speed-up of the best loop that begins BATCH groups with every version and throws nothing away."""
    there = [0.0]  # when version v is there
    for version in range(1, DRAWN_STEPS + 1):
        first = version - bound - 1
        finished = there[first] + longest[first] if first >= 0 else 0.0
        there.append(max(finished, there[-1]) + train_s)
    return (statistics.fmean(longest) + train_s) / (there[-1] / DRAWN_STEPS)


@dataclass(frozen=True)
class Row:
    name: str
    result: Result
    speedup: float


def workload(args: argparse.Namespace, tail: bool, train_s: float) -> list[Row]:
    """Every bound on one workload."""
    synchronous = simulate(args, tail, train_s)
    name = "2 % samples 50x longer" if tail else "no tail"
    print(f"\n{name}: train {train_s:.0f} s, synchronous step {synchronous.step_s:.0f} s\n")
    print("| K | step s | speed-up | limit: throughput | staleness | these lengths | oldest | wasted | violations |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    rows, longest = [], longest_of_steps(args.seed, tail)
    for bound in BOUNDS:
        for resume in (False, True) if bound == 4 else (False,):
            flags = ("--fully-async", "--max-staleness", str(bound))
            result = simulate(args, tail, train_s, *flags, bound=bound, resume=resume)
            produced_s = synchronous.tokens_per_step / (BATCH * GROUP_SIZE)
            throughput = synchronous.step_s / max(train_s, produced_s)
            speedup = synchronous.step_s / result.step_s
            label = f"{bound}, resumed" if resume else str(bound)
            these = limit_of_lengths(longest, train_s, bound)
            print(
                f"| {label} | {result.step_s:.0f} | {speedup:.2f} | {throughput:.2f} | {bound + 1} | {these:.2f} | "
                f"{result.oldest} | {result.wasted:.2%} | {result.violations} |",
                flush=True,
            )
            rows.append(Row(label, result, speedup))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train_s = simulate(args, False, 0.0).step_s
    equal, tail = workload(args, False, train_s), workload(args, True, train_s)
    rows = equal + tail
    speedup_equal = min(row.speedup for row in equal if "resumed" not in row.name)
    (speedup_tail,) = [row.speedup for row in tail if row.name == "4"]
    violations, wasted = sum(row.result.violations for row in rows), max(row.result.wasted for row in rows)
    print(
        f"\nviolations={violations} speedup_equal={speedup_equal:.2f} speedup_long_tail={speedup_tail:.2f} "
        f"wasted={wasted:.4f}"
    )
    return 0 if violations == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
