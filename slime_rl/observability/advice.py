"""What limits a run, in words: each sentence has the measured number and the flag to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

History = Sequence[Mapping[str, float]]

WINDOW = 20  # recent steps that a verdict rests on
GAP = "train/logprob_diff_mean_abs"  # what is read of all steps
MIN_STEPS = 3  # fewer say more about start-up than about the run


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One finding. `topic` stays the same while the numbers in the sentence change."""

    topic: str
    sentence: str


def advise(
    history: History, *, rollout_ahead: int = 0, run_phases_s: Mapping[str, float] | None = None
) -> list[Advice]:
    """Findings from the metrics of the steps so far, oldest first, each mapping with its `step`.

    Says nothing before `MIN_STEPS` steps. Metrics that a run does not have are simply not judged. `run_phases_s` are
    the seconds of the whole run by phase; they hold what lies between steps, such as evaluation.
    """
    recent = history[-WINDOW:]
    if len(recent) < MIN_STEPS:
        return []
    found = [rule(recent) for rule in _RULES]
    found += [_idle(recent, rollout_ahead), _gap(history), _evaluation(run_phases_s or {})]
    return [advice for advice in found if advice is not None]


def _idle(recent: History, rollout_ahead: int) -> Advice | None:
    waiting = _time_share(recent, "rollout")
    training = sum(_time_share(recent, phase) or 0.0 for phase in ("log_probs", "train"))
    if waiting is None:
        return None
    if waiting > 0.6:
        ahead = "--rollout-ahead 1 (generate while training), " if rollout_ahead == 0 else ""
        return Advice(
            topic="trainer_idle",
            sentence=f"trainers idle {waiting:.0%} of the time, waiting for the engines: try {ahead}"
            "more --rollout-num-engines, or a lower --max-response-len.",
        )
    sampled = "rollout/staleness_max" in recent[-1]  # supervised steps ask no engine
    if rollout_ahead == 0 and training > 0.6 and sampled:
        return Advice(
            topic="engines_idle",
            sentence=f"engines idle {1 - waiting:.0%} of the time while training runs: try --rollout-ahead 1 "
            "(generate while training) or more --train-num-workers.",
        )
    return None


def _gap(history: History) -> Advice | None:
    known = [(int(line.get("step", i)), line[GAP]) for i, line in enumerate(history) if _finite(line.get(GAP))]
    if len(known) < 10:
        return None
    first, last = fmean(v for _, v in known[:5]), fmean(v for _, v in known[-5:])
    # Below 1e-4 both programs agree to float32's rounding; growth there means nothing.
    if last < 1e-4 or last < 3 * first:
        return None
    return Advice(
        topic="logprob_gap",
        sentence=f"engine/trainer log-prob gap grew {last / max(first, 1e-12):.0f}x since step {known[0][0]} "
        f"(now {last:.2g} nats): try --off-policy-correction tis_token, --weight-update-mode retract, or "
        "--engine-dtype and --train-dtype float32 on both sides.",
    )


def _equal_rewards(recent: History) -> Advice | None:
    share = _mean(recent, "rollout/zero_std_groups_fraction")
    if share is None or share <= 0.4:
        return None
    reward, best = _mean(recent, "rollout/reward_mean"), _mean(recent, "rollout/reward_max")
    easy = reward is not None and best is not None and best > 0 and reward > 0.5 * best
    cause = "the prompts may be too easy now" if easy else "the prompts may be too hard"
    return Advice(
        topic="equal_rewards",
        sentence=f"{share:.0%} of groups have equal rewards and teach nothing ({cause}): try --dynamic-filter-path "
        "nonzero_std, a higher --n-samples-per-prompt or --rollout-temperature, or other --prompt-data.",
    )


def _truncated(recent: History) -> Advice | None:
    share = _mean(recent, "rollout/truncated_fraction")
    if share is None or share <= 0.2:
        return None
    return Advice(
        topic="truncated",
        sentence=f"{share:.0%} of responses run into the length limit: try a higher --max-response-len, or "
        "--rollout-stop with the text that ends an answer.",
    )


def _clipped(recent: History) -> Advice | None:
    share = _mean(recent, "train/pg_clipfrac")
    if share is None or share <= 0.2:
        return None
    return Advice(
        topic="clipped",
        sentence=f"{share:.0%} of tokens are clipped, so updates reach far from the sampling policy: try a lower --lr, "
        "fewer --num-updates-per-rollout or --num-epochs-per-rollout.",
    )


def _not_finite(recent: History) -> Advice | None:
    bad = [n for n in ("train/loss", "train/grad_norm") if n in recent[-1] and not _finite(recent[-1][n])]
    if not bad:
        return None
    return Advice(
        topic="not_finite",
        sentence=f"{bad[0]} is not finite: try a lower --lr, a lower --clip-grad, or --train-dtype float32; "
        "continue from before it with --load.",
    )


def _evaluation(run_phases_s: Mapping[str, float]) -> Advice | None:
    seconds = run_phases_s.get("evaluate", 0.0)
    total = sum(s for phase, s in run_phases_s.items() if phase not in ("start", "export", "stop"))
    if total <= 0 or seconds <= 0.4 * total:
        return None
    return Advice(
        topic="slow_evaluation",
        sentence=f"{seconds / total:.0%} of the time goes into evaluation: try a larger --eval-interval, or fewer rows "
        "as FILE@[0:N] in --eval-prompt-data.",
    )


def _phase_rule(phase: str, limit: float, cure: str) -> Callable[[History], Advice | None]:
    def rule(recent: History) -> Advice | None:
        share = _time_share(recent, phase)
        if share is None or share <= limit:
            return None
        return Advice(topic=f"slow_{phase}", sentence=f"{share:.0%} of the time goes into {phase}: try {cure}.")

    return rule


_RULES: tuple[Callable[[History], Advice | None], ...] = (
    _not_finite,
    _equal_rewards,
    _truncated,
    _clipped,
    _phase_rule("sync", 0.25, "a larger --rollout-batch-size (fewer updates per sample), or the other --weight-sync"),
    _phase_rule("save", 0.2, "a larger --save-interval"),
)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _mean(lines: History, name: str) -> float | None:
    values = [line[name] for line in lines if _finite(line.get(name))]
    return fmean(values) if values else None


def _time_share(lines: History, phase: str) -> float | None:
    """Share of step time in a phase; None when no step has that phase or steps carry no time."""
    total = sum(line.get("perf/step_s", 0.0) for line in lines)
    if total <= 0 or not any(f"timing_s/{phase}" in line for line in lines):
        return None
    return sum(line.get(f"timing_s/{phase}", 0.0) for line in lines) / total
