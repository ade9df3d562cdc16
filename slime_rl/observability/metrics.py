"""Every metric of a run: name, unit, how values become one number, and meaning. docs/metrics.md is made from it.

In a name, `<x>` stands for a part that differs: `timing_s/<phase>`. Two clocks of steps are used in metrics.jsonl:
train/, rollout/, timing_s/ and perf/ carry the number of the step they belong to (the first is 0); eval/ carries the
number of steps done before it, so eval at step 0 is the model as it came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import fmean
from typing import Any

from slime_rl.data.episodes import rewards_by_role
from slime_rl.types import Sample, Status


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of docs/metrics.md."""

    name: str
    unit: str
    reduction: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric, with any text without a slash for each `<x>`."""
        pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in self._parts())
        return re.fullmatch(pattern, name) is not None

    def _parts(self) -> list[str]:
        return [part for part in re.split(r"(<[^>]+>)", self.name) if part]


def _metric(name: str, unit: str, reduction: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning)


PERCENTILES = (10, 25, 50, 75, 90)  # of response lengths

_LOSS = "weighted as --loss-aggregation says over the update, then mean over updates"
_UPDATES = "mean over the step's optimizer updates"
_TOKENS = "mean over trained tokens, then over updates"
_SAMPLES = "mean over finished samples"

# fmt: off
METRICS: tuple[Metric, ...] = (
    _metric("train/loss", "-", _LOSS, "What the optimizer minimises: policy loss plus KL and entropy terms; SFT: NLL."),
    _metric("train/pg_loss", "-", _LOSS, "Policy-gradient part of the loss."),
    _metric("train/kl_loss", "nats", _LOSS, "KL to the reference model by --kl-loss-type, before --kl-loss-coef."),
    _metric("train/entropy", "nats", _LOSS, "Entropy of the policy's next-token distribution at trained positions."),
    _metric("train/ppo_kl", "nats", _LOSS, "Old minus current log-prob (k1): how far this step moved the policy."),
    _metric("train/pg_clipfrac", "share", _LOSS, "Trained tokens whose ratio was clipped."),
    _metric("train/grad_norm", "-", _UPDATES, "L2 norm of the whole gradient before clipping."),
    _metric("train/lr", "-", "value of the last update", "Learning rate."),
    _metric("train/logprob_diff_mean_abs", "nats", "mean over trained tokens of the step",
            "Absolute difference of trainer's and engine's log-prob of the sampled tokens: how far both agree; "
            "where rollout/staleness_max is not 0, how far the policy has moved since, too."),
    _metric("train/logprob_diff_max_abs", "nats", "max over trained tokens of the step", "Largest such difference."),
    _metric("train/tokens", "tokens", "sum over workers", "Prompt and response tokens that went through the trainer."),
    _metric("train/num_microbatches", "batches", "sum over updates, per worker", "Packed micro-batches of the step."),
    _metric("train/trained_tokens", "tokens", "sum over workers", "Response tokens with a loss."),
    _metric("train/nll", "nats", "mean over trained tokens", "Negative log-likelihood of the label; --loss sft."),
    _metric("train/advantages_mean", "-", "mean over trained tokens", "Near 0 where a group is its own baseline."),
    _metric("train/advantages_abs_mean", "-", "mean over trained tokens", "Their size: 0 means nothing is learnt."),
    _metric("train/entropy_loss", "nats", _LOSS, "Entropy part of the loss, before --entropy-coef."),
    _metric("train/behave_weight", "-", _TOKENS, "Decoupled PPO: weight of the behaviour policy."),
    _metric("train/teacher_kl", "nats", _TOKENS, "KL to the teacher, for losses that have one."),
    _metric("train/value_loss", "-", _LOSS, "Critic's loss."),
    _metric("train/value_clipfrac", "share", _TOKENS, "Tokens whose value was clipped."),
    _metric("train/kl_reward", "nats", "mean over trained tokens of the step",
            "KL to the reference by --kl-reward-type, before --kl-coef."),
    _metric("train/kl_coef", "-", "value of the step", "What it was taken off the rewards with; --kl-target moves it."),
    _metric("critic/<name>", "-", _UPDATES,
            "The critic's grad_norm and lr, mean of the returns, and the share of their variance its values explain."),
    _metric("train/value_mean", "reward", _TOKENS, "Critic's mean value."),
    _metric("train/train_rollout_logprob_abs_diff", "nats", _TOKENS, "As logprob_diff_mean_abs, inside the loss."),
    _metric("off_policy/weight", "-", _TOKENS, "Weight of --off-policy-correction."),
    _metric("off_policy/rejected", "share", _TOKENS, "Tokens that the correction leaves out."),
    _metric("off_policy/ratio", "-", _TOKENS, "Trainer's old over engine's probability; 1 where both agree."),
    _metric("off_policy/ratio_max", "-", "max over trained tokens", "Largest such ratio."),
    _metric("off_policy/ess", "share", "over the update", "Effective sample size: share of samples that still count."),
    _metric("off_policy/chi2", "-", _TOKENS, "Chi-square divergence: mean squared ratio minus 1."),
    _metric("off_policy/kl_k1", "nats", _TOKENS, "KL(engine, trainer) by estimator k1."),
    _metric("off_policy/kl_k3", "nats", _TOKENS, "KL(engine, trainer) by estimator k3."),
    _metric("off_policy/perplexity_ratio", "-", _TOKENS, "Sample's perplexity by the trainer over that by the engine."),
    _metric("rollout/reward_mean", "reward", _SAMPLES, "Reward of the samples trained on; unscored ones are left out."),
    _metric("rollout/reward_std", "reward", "population standard deviation over finished samples", "Their spread."),
    _metric("rollout/reward_max", "reward", "max over finished samples", "Best reward."),
    _metric("rollout/reward_min", "reward", "min over finished samples", "Worst reward."),
    _metric("rollout/response_length_mean", "tokens", _SAMPLES, "Response tokens, tool and environment text included."),
    _metric("rollout/response_length_max", "tokens", "max over finished samples", "Longest response."),
    _metric("rollout/response_length_p<percent>", "tokens", "percentile over finished samples",
            "Length that this percentage of the responses stay below: 10, 25, 50, 75, 90."),
    _metric("rollout/truncated_fraction", "share", _SAMPLES, "Samples that ran into a length limit."),
    _metric("rollout/zero_std_groups_fraction", "share", "mean over groups of two episodes or more",
            "Groups whose rewards are all equal (within each role of an agent's game); they teach GRPO nothing."),
    _metric("rollout/groups_dropped/<reason>", "groups", "sum since the step before",
            "Groups dropped, by reason: a filter's, over_age and stale (too old), late_samples, nothing_to_train, ..."),
    _metric("rollout/samples_left_out/<reason>", "samples", "sum over the step's groups",
            "Samples of groups that train which do not: by --sample-filter-path, or because they were late or failed."),
    _metric("rollout/replayed_groups", "groups", "sum over the step", "Groups that train again; --replay-groups."),
    _metric("rollout/staleness_mean", "versions", "mean over trained tokens of the step",
            "Trainer's weight version minus the version that sampled the token; masked tokens do not count."),
    _metric("rollout/staleness_max", "versions", "max over trained tokens of the step", "Their oldest one."),
    _metric("rollout/tokens_by_age/<age>", "share", "over trained tokens of the step",
            "Trained tokens sampled by weights that many versions old; from 8 on together."),
    _metric("rollout/tokens_per_s", "tokens/s", "response tokens / seconds of the rollout", "Generation throughput."),
    _metric(
        "rollout/seconds",
        "s",
        "wall time",
        "From asking for the step's groups to having them all; with --fully-async since the step before was taken.",
    ),
    _metric("rollout/wait_s", "s", "wall time", "How long training waited for them; less when generation runs ahead."),
    _metric("rollout/reward_seconds", "s", "sum over groups", "Time in reward functions; groups overlap."),
    _metric("rollout/over_age_groups", "groups", "sum over the step",
            "Groups over the age that may train: interrupted, generated anew, dropped or masked (--over-age)."),
    _metric("rollout/over_age_tokens", "tokens", "sum over the step",
            "Their tokens that are not trained on; part of the wasted ones."),
    _metric("rollout/wasted_tokens", "tokens", "sum over the step",
            "Tokens sampled for the loss that never train: of samples that started again, were late, failed, filtered "
            "or over age, and older ones of interrupted samples (--mask-offpolicy-in-partial-rollout)."),
    _metric("rollout/interrupted_groups", "groups", "sum over the step", "Groups that went back unfinished."),
    _metric("rollout/groups_in_flight", "groups", "value when the step was taken", "Groups that were running then."),
    _metric("rollout/num_turns_mean", "turns", "mean over multi-turn episodes", "Turns of the policy."),
    _metric("rollout/tool_calls_mean", "calls", "mean over multi-turn episodes", "Tool calls that could be read."),
    _metric("rollout/tool_errors_mean", "calls", "mean over multi-turn episodes", "Calls answered with an error."),
    _metric("rollout/inexact_episodes_fraction", "share", "mean over multi-turn episodes",
            "Completed episodes whose ids part from the chat template's rendering; docs/agents.md says why they may."),
    _metric("rollout/cached_prompt_tokens_fraction", "share", "since the start of the run",
            "Prompt tokens that engines found in their prefix cache."),
    _metric(
        "rollout/sampling_rounds",
        "rounds",
        "sum over the step",
        "Groups begun for the step, in multiples of --rollout-batch-size or --over-sampling-batch-size.",
    ),
    _metric("rewards/<event>", "calls", "sum since the start of the run",
            "Calls of fenced reward code, and those that failed: timeouts, crashes, memory_failures, errors."),
    _metric("buffer/<state>", "groups", "value at the end of the step", "Groups in each state of the buffer's ledger."),
    _metric("buffer/requeued/<reason>", "groups", "sum since the start of the run",
            "Generated groups that were generated anew: stale ones, whose tokens were too old."),
    _metric("buffer/replayed", "groups", "sum since the start of the run",
            "Groups that trained again; they are not among the committed ones, which have trained once."),
    _metric("buffer/skipped_rows/<reason>", "rows", "rows seen so far",
            "Rows of --prompt-data that are left out: bad (--bad-rows skip) or long (--long-prompt skip)."),
    _metric("buffer/dropped/<reason>", "groups", "sum since the start of the run", "Groups dropped so far, by reason."),
    _metric("eval/<name>/accuracy", "reward", "mean over episodes",
            "Mean reward on the held-out set <name>; several samples of one episode count once."),
    _metric("eval/<name>/response_length_mean", "tokens", "mean over samples", "Response tokens on that set."),
    _metric("eval/<name>/truncated_fraction", "share", "mean over samples", "Its samples that hit a length limit."),
    _metric(
        "eval/<name>/unfinished_fraction",
        "share",
        "mean over samples",
        "Its samples that were given up on (FAILED) or never came to an end; not shown where there are none.",
    ),
    _metric("eval/<name>/num_prompts", "prompts", "count", "Rows of that set."),
    _metric("eval/<name>/seconds", "s", "wall time", "How long its evaluation took."),
    _metric("eval/<name>/pass_at_k", "share", "mean over prompts",
            "Prompts with at least one full reward among --eval-n-samples-per-prompt samples."),
    _metric("eval/<name>/pass_at_<k>", "share", "mean over prompts",
            "Chance that k of a prompt's samples hold a full reward (unbiased); with several samples a prompt."),
    _metric("eval/<name>/majority", "share", "mean over prompts", "The most frequent final answer is right."),
    _metric("timing_s/<phase>", "s", "sum over the step", "Driver's wall time in a phase; `other` is no phase."),
    _metric("timing_s/<phase>/<part>", "s", "sum over the step", "Part of a phase, as a worker measures it."),
    _metric("perf/step_s", "s", "wall time", "Seconds of the whole step."),
    _metric("perf/tokens_per_s", "tokens/s", "train/tokens / perf/step_s", "Throughput of the whole loop."),
    _metric("perf/train_tokens_per_s", "tokens/s", "train/tokens / seconds inside the worker", "Trainer's throughput."),
    _metric("perf/train_peak_rss_gib", "GiB", "max since the start of the run", "Host memory of the first worker."),
    _metric("perf/train_peak_gpu_gib", "GiB", "max since the start of the run", "GPU memory of the first worker."),
    _metric("perf/peak_rss_gib", "GiB", "max since the start of the run",
            "Host memory of the driver and all its children, Ray's included; shared pages count once."),
    _metric("sync/seconds", "s", "wall time", "Weight update from the trainer to all engines."),
    _metric("sync/bytes", "bytes", "sum over buckets", "Weights sent."),
    _metric("sync/changed_share", "share", "over all values", "Values that were sent: below 1 with disk-delta."),
    _metric("engines/serving", "engines", "count at the end of the step", "Behind the router."),
    _metric("engines/down", "engines", "count at the end of the step", "Ended or hung; being replaced."),
    _metric("engines/stale", "engines", "count at the end of the step", "Without the current weights: no traffic."),
    _metric("engines/slow", "engines", "count at the end of the step", "Left out for a while (--engine-slow-s)."),
    _metric("faults/engine_restarts", "restarts", "count since the start", "Engines replaced, see docs/faults.md."),
    _metric("faults/slow_engines", "times", "count since the start", "Engines left out for a while (--engine-slow-s)."),
    _metric("faults/router_restarts", "restarts", "count since the start", "Times the router was started again."),
    _metric("faults/train_restarts", "restarts", "count since the start", "Times the train group was built anew."),
)
# fmt: on


def find_metric(name: str) -> Metric | None:
    """The documented metric that `name` is an instance of, or None."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def phase_of(name: str) -> str | None:
    """The phase that a metric times as a whole: `train` for timing_s/train, None for timing_s/train/optimizer."""
    kind, _, phase = name.partition("/")
    return phase if kind == "timing_s" and "/" not in phase else None


def as_number(value: Any) -> float | None:
    """None for null, which stands for NaN, and for whatever else another program may have written there."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # JSON's whole numbers have no limit
        return None


def reward_value(reward: Any) -> float | None:
    """A sample's reward as a number: a dict gives its "score"; None, text and NaN are no value. 0.0 is a value."""
    if isinstance(reward, Mapping):
        reward = reward.get("score")
    if isinstance(reward, Real) and not math.isnan(reward):
        return float(reward)
    return None


def summarise_samples(samples: Sequence[Sample], *, seconds: float | None = None) -> dict[str, float]:
    """rollout/* metrics of the finished ones among `samples`; what cannot be told is left out, never made up.

    Args:
        samples: samples of one step in any order; unfinished and failed ones are ignored.
        seconds: how long they took to produce; gives the throughput.
    """
    finished = [sample for sample in samples if sample.status.is_finished]
    if not finished:
        return {}
    lengths = [sample.response_length for sample in finished]
    truncated = sum(sample.status is Status.TRUNCATED for sample in finished)
    metrics = {
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_fraction": truncated / len(finished),
    }
    lengths.sort()
    metrics |= {f"rollout/response_length_p{p}": float(lengths[len(lengths) * p // 100]) for p in PERCENTILES}
    metrics |= _reward_metrics([value for s in finished if (value := reward_value(s.reward)) is not None])
    metrics |= _spread_metrics(finished)
    metrics |= _agent_metrics([s.metadata["agent"] for s in finished if "agent" in s.metadata])
    if seconds is not None and seconds > 0:
        metrics["rollout/tokens_per_s"] = sum(lengths) / seconds
    return metrics


def _reward_metrics(rewards: list[float]) -> dict[str, float]:
    if not rewards:
        return {}
    mean = fmean(rewards)
    return {
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(fmean((r - mean) ** 2 for r in rewards)),
        "rollout/reward_max": max(rewards),
        "rollout/reward_min": min(rewards),
    }


def _agent_metrics(states: list[Any]) -> dict[str, float]:
    """Of multi-turn episodes; `states` are what slime_rl.rollout.agent keeps in metadata["agent"]."""
    found: dict[str, float] = {}
    for name, key in (("num_turns", "num_turns"), ("tool_calls", "num_tool_calls"), ("tool_errors", "num_tool_errors")):
        values = [state.get(key) for state in states if isinstance(state, dict)]
        if numbers := [value for value in values if isinstance(value, Real)]:
            found[f"rollout/{name}_mean"] = fmean(map(float, numbers))
    partings = [state["parting"] is not None for state in states if isinstance(state, dict) and "parting" in state]
    if partings:
        found["rollout/inexact_episodes_fraction"] = fmean(partings)
    return found


def _spread_metrics(finished: Iterable[Sample]) -> dict[str, float]:
    groups: dict[int, list[Sample]] = {}
    for sample in finished:
        if (value := reward_value(sample.reward)) is not None:
            groups.setdefault(sample.group_index, []).append(replace(sample, reward=value))
    found = [rewards_by_role(samples) for samples in groups.values()]
    compared = [roles for roles in found if max(map(len, roles)) > 1]
    if not compared:
        return {}
    # Equality, not a standard deviation: seven rewards of 0.1 have a std above 0 in floating point.
    return {"rollout/zero_std_groups_fraction": fmean(all(min(r) == max(r) for r in roles) for roles in compared)}
