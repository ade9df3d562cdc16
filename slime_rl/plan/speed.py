"""How long a step takes and who waits: from data sheets and assumed efficiencies, or from the rates of a measured run.

Training a token costs 6·N floating-point operations forward and backward (2·N a forward pass; arXiv:2001.08361) and
6·layers·a·d·L for causal attention over sequences of L tokens (arXiv:2205.05198, appendix A, halved for causality);
N counts what a token is multiplied with. Recomputation adds a forward pass.

Decoding one token for each of B requests reads the weights once and the B caches (arXiv:2211.05102): the time of one
round is max(bytes / bandwidth, 2·N·B / flops). A prompt costs 2·N a token, once for all of its samples. A rollout takes
as long as its tokens need at that rate, and never less than its longest response alone.

The pipeline's idle share with m micro-batches over p stages, each in v parts, is (p-1) / (v·m + p-1)
(arXiv:2104.04473, 2.2).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from slime_rl.config import Config
from slime_rl.plan.hardware import Accelerator
from slime_rl.plan.memory import EnginePlan
from slime_rl.plan.shape import ModelShape

# Shares of the data sheet that are usually reached; printed with the plan, replaced by --rates RUN_DIR.
TRAIN_EFFICIENCY = 0.35
MOE_TRAIN_EFFICIENCY = 0.2
DECODE_EFFICIENCY = 0.5
SYNC_EFFICIENCY = 0.5


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a typical sample."""

    prompt: float
    response: float  # mean
    longest: float  # of the longest response of a step

    @property
    def sequence(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the parts of this cluster do in a second."""

    rollout_tokens_s: float  # response tokens of all engines
    request_tokens_s: float  # one request, with the others running
    train_tokens_s: float  # tokens of all workers, all passes included
    sync_s: float
    source: str


def num_micro_batches(config: Config, lengths: Lengths) -> int:
    """Micro-batches of one update on one data-parallel worker."""
    samples = config.train.samples_per_update / config.data_parallel_size
    if config.train.micro_batch_size is not None:
        return math.ceil(samples / config.train.micro_batch_size)
    # Context parallelism spreads a micro-batch over its workers.
    room = config.train.max_tokens_per_worker * config.parallel.context_parallel_size
    per_batch = max(1, int(room // lengths.sequence))
    return math.ceil(samples / per_batch)


def pipeline_idle_share(num_stages: int, micro_batches: int, parts: int = 1) -> float:
    """(p-1) / (v·m + p-1)."""
    return (num_stages - 1) / (parts * micro_batches + num_stages - 1)


def forward_passes(config: Config) -> float:
    """Forward passes a token takes in one step; a backward pass counts two."""
    algorithm, train = config.algorithm, config.train
    updates = train.num_updates_per_rollout * train.num_epochs_per_rollout
    passes = 3.0 * train.num_epochs_per_rollout
    if config.model.recompute_activations:
        passes += train.num_epochs_per_rollout
    if train.loss == "policy":
        skips_old = algorithm.old_log_probs == "auto" and updates == 1 and algorithm.kl_coef == 0
        passes += algorithm.old_log_probs != "rollout" and not skips_old
        passes += algorithm.needs_reference
        passes += config.model.teacher_load is not None
        if config.needs_critic and not config.critic_is_apart:  # counted as large as the policy; apart, as no slower
            passes += 1 + (4 if config.model.recompute_activations else 3) * train.num_epochs_per_rollout
    return passes


def train_flops_per_token(shape: ModelShape, config: Config, lengths: Lengths) -> float:
    """Floating-point operations of all passes over one token."""
    attention = 2 * shape.num_layers * shape.query_width * lengths.sequence
    return forward_passes(config) * (2 * shape.active_parameters + attention)


def decode_round_s(shape: ModelShape, engine: EnginePlan, gpu: Accelerator, requests: float, context: float) -> float:
    """Seconds in which an engine makes one token for each of `requests` requests of `context` tokens."""
    touched = 1.0
    if shape.num_experts:  # experts that no token of the round has chosen are not read
        chosen = 1 - (1 - shape.experts_per_token / shape.num_experts) ** requests
        experts = shape.num_moe_layers * shape.num_experts * shape.expert
        touched = 1 - (1 - chosen) * experts / shape.parameters
    reading = (touched * engine.weight_bytes + requests * context * engine.kv_bytes_per_token) / gpu.memory_bytes_s
    computing = 2 * shape.active_parameters * requests / (engine.num_gpus * gpu.flops)
    return max(reading, computing) / DECODE_EFFICIENCY


def prefill_s(shape: ModelShape, engine: EnginePlan, gpu: Accelerator, tokens: float) -> float:
    """Seconds in which an engine reads `tokens` tokens of prompts that are not in its cache."""
    return 2 * shape.active_parameters * tokens / (engine.num_gpus * gpu.flops * DECODE_EFFICIENCY)


def estimate_training(shape: ModelShape, config: Config, gpu: Accelerator, lengths: Lengths) -> Rates:
    """Rates of a run without engines: what no engine samples takes no time."""
    efficiency = MOE_TRAIN_EFFICIENCY if shape.num_experts else TRAIN_EFFICIENCY
    pipeline = 1 - pipeline_idle_share(config.parallel.pipeline_model_parallel_size, num_micro_batches(config, lengths))
    flops = config.cluster.train_num_workers * gpu.flops * efficiency * pipeline
    return Rates(
        rollout_tokens_s=math.inf,
        request_tokens_s=math.inf,
        train_tokens_s=flops / train_flops_per_token(shape, config, lengths),
        sync_s=0.0,
        source=f"{gpu.name}'s data sheet at {efficiency:.0%} training efficiency",
    )


def estimate_rates(
    shape: ModelShape, config: Config, engine: EnginePlan, gpu: Accelerator, lengths: Lengths, *, crosses_nodes: bool
) -> Rates:
    """Rates from the data sheet and the efficiencies above. The samples of a prompt share one prefill."""
    cluster, training = config.cluster, estimate_training(shape, config, gpu, lengths)
    wanted = config.train.samples_per_rollout / cluster.rollout_num_engines
    fitting = max(1.0, engine.kv_tokens / lengths.sequence)
    requests = min(wanted, fitting, config.rollout.rollout_concurrency)
    context = lengths.prompt + lengths.response / 2
    round_s = decode_round_s(shape, engine, gpu, requests, context)
    prompt_s = prefill_s(shape, engine, gpu, lengths.prompt / config.train.n_samples_per_prompt)
    token_s = round_s / requests + prompt_s / lengths.response  # of one response token of an engine
    link = gpu.network_bytes_s if crosses_nodes else gpu.link_bytes_s
    sync_bytes = engine.weight_bytes * engine.num_gpus
    return Rates(
        rollout_tokens_s=cluster.rollout_num_engines / token_s,
        request_tokens_s=1 / decode_round_s(shape, engine, gpu, max(1.0, requests / 4), context),
        train_tokens_s=training.train_tokens_s,
        sync_s=sync_bytes / (link * SYNC_EFFICIENCY),
        source=f"{training.source.removesuffix(' efficiency')}, {DECODE_EFFICIENCY:.0%} decoding and "
        f"{SYNC_EFFICIENCY:.0%} link efficiency",
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in the steady state of the simulation."""

    rollout_s: float  # for which the engines work on a step's samples
    train_s: float
    sync_s: float
    step_s: float
    staleness: float  # weight versions between sampling and training, mean over steps
    trainer_idle: float  # shares of the step
    engines_idle: float


def estimate_step(config: Config, rates: Rates, lengths: Lengths) -> Step:
    """Times of the phases, and a simulation of who waits for whom."""
    samples = config.train.samples_per_rollout
    train_s = samples * lengths.sequence / rates.train_tokens_s
    if not config.needs_engines:
        return simulate(0.0, train_s, 0.0, 0)
    work_s = samples * lengths.response / rates.rollout_tokens_s
    span_s = max(work_s, lengths.longest / rates.request_tokens_s)
    if config.asynchrony.is_continuous:  # engines begin the next samples while the longest of these still run
        return simulate(work_s, train_s, rates.sync_s, config.asynchrony.max_staleness, span_s)
    return simulate(span_s, train_s, rates.sync_s, config.rollout.rollout_ahead)


def simulate(
    rollout_s: float, train_s: float, sync_s: float, ahead: int, span_s: float | None = None, num_steps: int = 200
) -> Step:
    """Run the loop of train.py on a clock: batch k may be made once step k - ahead begins; engines work on one batch
    after the other, `rollout_s` each, and stand still during a sync (requests in flight wait for it). A batch is
    there after `span_s`, when its last response is: for --fully-async longer than the engines are busy with it.
    """
    begun_at: list[float] = []
    made_at: list[float] = []
    starts: list[float] = []
    synced_at = [0.0]  # when the engines had the weights of version i
    clock = free_at = 0.0
    for step in range(num_steps):
        starts.append(clock)
        while len(made_at) <= min(step + ahead, num_steps - 1):
            begun_at.append(max(free_at, clock))
            free_at = begun_at[-1] + rollout_s
            made_at.append(begun_at[-1] + (rollout_s if span_s is None else span_s))
        trained = max(clock, made_at[step]) + train_s
        clock = trained + sync_s
        synced_at.append(clock)
        free_at = free_at + sync_s if free_at > trained else free_at
        begun_at = [at + sync_s if at > trained else at for at in begun_at]
        made_at = [at + sync_s if at > trained else at for at in made_at]
    versions = [bisect_right(synced_at, at + 1e-9) - 1 for at in begun_at]
    half = num_steps // 2
    step_s = (starts[-1] - starts[half]) / (num_steps - 1 - half)
    ages = [step - versions[step] for step in range(half, num_steps)]
    return Step(
        rollout_s=rollout_s,
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        staleness=sum(ages) / len(ages),
        trainer_idle=max(0.0, 1 - train_s / step_s) if step_s else 0.0,
        engines_idle=max(0.0, 1 - rollout_s / step_s) if step_s else 0.0,
    )
