"""The plan of a run: its sizes, its memory, its time, and what does not fit.

checkpoint's config.json ─► shape ─┐
flags ─► Config ───────────────────┼─► memory by part · micro-batches · rates ─► simulated step ─► Plan(problems)
accelerator, or a measured run ────┘
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from slime_rl.config import Config, ParallelConfig
from slime_rl.config.served_models import FLAG, ServedModel
from slime_rl.observability.metrics import as_number
from slime_rl.observability.run_record import RunRecord, load_run
from slime_rl.plan.hardware import ACCELERATORS, GIB, Accelerator
from slime_rl.plan.memory import CPU_PROCESS_BYTES, EnginePlan, Memory, critic_memory, engine_plan, training_memory
from slime_rl.plan.shape import ModelShape, read_shape
from slime_rl.plan.speed import (
    Lengths,
    Rates,
    Step,
    estimate_rates,
    estimate_step,
    estimate_training,
    num_micro_batches,
    pipeline_idle_share,
)

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the run would be. `accelerator` is None for CPUs; `num_gpus` is None when any number may be rented."""

    accelerator: Accelerator | None
    gpus_per_node: int = 8
    num_gpus: int | None = None

    @property
    def memory_bytes(self) -> float:
        return self.accelerator.memory_bytes if self.accelerator else float(psutil.virtual_memory().total)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `python -m slime_rl.plan` prints. `step` is None where nothing says how fast the parts are."""

    config: Config
    shape: ModelShape
    site: Site
    lengths: Lengths
    training: Memory
    critic: Memory | None  # of a worker of a critic that has its own train group
    engine: EnginePlan | None  # the smallest, which has least room and so sets the pace
    micro_batches: int
    pipeline_idle: float
    rates: Rates | None
    step: Step | None
    problems: list[str]

    @property
    def num_gpus(self) -> int:
        """GPUs of training workers and engines; with --colocate both have the same ones."""
        return gpus_of(self.config)

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_gpus / self.site.gpus_per_node)


def gpus_of(config: Config) -> int:
    """GPUs that a run takes."""
    cluster, engines = config.cluster, own_engine_gpus(config)
    beside = config.num_gpus_beside if config.needs_engines else 0
    critics = config.num_train_processes - cluster.train_num_workers
    workers = cluster.train_num_workers
    return (max(workers, engines) if cluster.colocate else workers + engines) + beside + critics


def own_engine_gpus(config: Config) -> int:
    """GPUs of the policy's engines (on CPU: their processes), none of which is somebody else's."""
    is_ours = config.needs_engines and not config.cluster.rollout_external_engine_addrs
    return config.served_models[0].num_gpus if is_ours else 0


def engine_plans(shape: ModelShape, config: Config, available_bytes: float) -> list[tuple[int, EnginePlan]]:
    """(number of engines, plan of one) for each group of the policy's engines, those of the smallest first."""
    policy = config.served_models[0]
    found = [(g.num_engines, engine_plan(shape, config.for_engine(policy, g), available_bytes)) for g in policy.groups]
    return sorted(found, key=lambda each: each[1].num_gpus)


def engine_counts(config: Config, *units: str) -> str:
    """The policy's engines as "2 x 1 + 1 x 4", or with the words for one GPU and for more after their sizes."""
    counts: Counter[int] = Counter()
    for group in config.served_models[0].groups:
        counts[group.num_gpus_per_engine] += group.num_engines
    return " + ".join(f"{count} x {size}{(units or ('', ''))[size != 1]}" for size, count in counts.items())


def find_site(config: Config, gpu: str | None = None, gpus_per_node: int = 8, num_gpus: int | None = None) -> Site:
    """The site by name; without one a CPU for --device cpu, else the commonest GPU.

    Raises:
        ValueError: a GPU that is not known, or no GPUs.
    """
    for flag, count in (("--gpus-per-node", gpus_per_node), ("--num-gpus", num_gpus)):
        if count is not None and count < 1:
            raise ValueError(f"{flag} must be >= 1, got {count}")
    name = gpu or (CPU if config.cluster.device == "cpu" else "h100-80g")
    if name == CPU:
        return Site(accelerator=None, gpus_per_node=gpus_per_node, num_gpus=num_gpus)
    if name not in ACCELERATORS:
        raise ValueError(f"--gpu must be one of {', '.join([CPU, *ACCELERATORS])}, got {name!r}")
    return Site(accelerator=ACCELERATORS[name], gpus_per_node=gpus_per_node, num_gpus=num_gpus)


def find_lengths(config: Config, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Typical lengths; where they are not known, half of the limits, and one response that runs into its limit.

    Raises:
        ValueError: a length that is not within its limit.
    """
    sampling = config.sampling
    for flag, mean, limit in (
        ("--mean-prompt-len", prompt, sampling.max_prompt_len),
        ("--mean-response-len", response, sampling.max_response_len),
    ):
        if mean is not None and not 0 < mean <= limit:
            within = flag.replace("mean", "max")
            raise ValueError(f"{flag} must be > 0 and at most {within} ({limit}), got {mean:g}")
    return Lengths(
        prompt=prompt if prompt is not None else sampling.max_prompt_len / 2,
        response=response if response is not None else sampling.max_response_len / 2,
        longest=float(sampling.max_response_len),
    )


def make_plan(config: Config, site: Site, lengths: Lengths, rates: Rates | None = None) -> Plan:
    """The plan for a config; `rates` of a measured run take the place of estimated ones."""
    device = "cpu" if site.accelerator is None else "cuda"
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device))
    shape = read_shape(config.model.hf_checkpoint)
    micro_batches = num_micro_batches(config, lengths)
    training = training_memory(shape, config, site.memory_bytes, num_micro_batches=micro_batches)
    critic = None
    if config.critic_is_apart:
        critic = critic_memory(config, site.memory_bytes, num_micro_batches=micro_batches)
    engines = engine_plans(shape, config, site.memory_bytes) if config.needs_engines else []
    engine = engines[0][1] if engines else None
    problems = [*shape_problems(shape, config), *_length_problems(shape, config)]
    problems += [*_memory_problems(config, site, training, critic, engines), *_node_problems(config, site)]
    if rates is None and site.accelerator is not None:
        rates = _estimated(shape, config, engine, site, lengths)
    plan = Plan(
        config=config,
        shape=shape,
        site=site,
        lengths=lengths,
        training=training,
        critic=critic,
        engine=engine,
        micro_batches=micro_batches,
        pipeline_idle=pipeline_idle_share(config.parallel.pipeline_model_parallel_size, micro_batches),
        rates=rates,
        step=estimate_step(config, rates, lengths) if rates else None,
        problems=problems,
    )
    if site.accelerator and site.num_gpus is not None and plan.num_gpus > site.num_gpus:
        problems.append(
            f"the run needs {plan.num_gpus} GPUs, there are {site.num_gpus}: lower --train-num-workers "
            f"({config.cluster.train_num_workers}), --critic-num-workers ({config.critic.critic_num_workers}) or "
            "--rollout-num-engines x --rollout-num-gpus-per-engine "
            f"({engine_counts(config)})"
        )
    return plan


def _estimated(
    shape: ModelShape, config: Config, engine: EnginePlan | None, site: Site, lengths: Lengths
) -> Rates | None:
    """None where an engine cannot hold a request."""
    assert site.accelerator is not None
    if engine is None:
        return estimate_training(shape, config, site.accelerator, lengths)
    if engine.kv_tokens <= 0:
        return None
    crosses = gpus_of(config) > site.gpus_per_node
    return estimate_rates(shape, config, engine, site.accelerator, lengths, crosses_nodes=crosses)


def shape_problems(shape: ModelShape, config: Config) -> list[str]:
    """Parallel sizes that the policy's or the critic's model cannot have."""
    found = _parallel_problems(shape, config.parallel, config.data_parallel_size, "--")
    for model in config.served_models:
        served = shape if model.model_path is None or model.is_policy else _shape_beside(model.model_path)
        for size in model.sizes:
            found += _engine_size_problems(_size_flag(config, model), served, size) if served else []
    if config.critic_is_apart:
        critic = read_shape(config.critic.critic_load or config.model.hf_checkpoint)
        found += _parallel_problems(critic, config.critic_parallel, config.critic_data_parallel_size, "--critic-")
    return found


def _size_flag(config: Config, model: ServedModel) -> str:
    """What gives the size of the engines of `model`."""
    file = config.engine.sglang_config
    return f"{FLAG} {file}: {model.name}: num_gpus_per_engine" if file else "--rollout-num-gpus-per-engine"


def _shape_beside(model_path: str) -> ModelShape | None:
    """Of a model beside the policy; None where it is of a kind that only SGLang knows."""
    try:
        return read_shape(model_path)
    except ValueError:
        return None


def _engine_size_problems(flag: str, shape: ModelShape, size: int) -> list[str]:
    if shape.query_heads % size:
        return [f"{flag} must divide the model's {shape.query_heads} attention heads, got {size}"]
    if shape.kv_heads % size and size % shape.kv_heads:
        return [f"{flag} must divide the model's {shape.kv_heads} key-value heads or be a multiple of them, got {size}"]
    return []


def _parallel_problems(shape: ModelShape, p: ParallelConfig, data_parallel_size: int, prefix: str) -> list[str]:
    """`prefix` begins the flags that set these sizes."""
    rules = [
        ("tensor-model-parallel-size", p.tensor_model_parallel_size, "attention heads", shape.query_heads),
        ("tensor-model-parallel-size", p.tensor_model_parallel_size, "key-value heads", shape.kv_heads),
        ("pipeline-model-parallel-size", p.pipeline_model_parallel_size, "layers", shape.num_layers),
    ]
    if shape.num_experts:
        rules.append(("expert-model-parallel-size", p.expert_model_parallel_size, "experts", shape.num_experts))
    found = [
        f"{prefix}{flag} must divide the model's {count} {what}, got {size}"
        for flag, size, what, count in rules
        if count % size
    ]
    if shape.num_experts and p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        found.append("--sequence-parallel must be on for experts with --tensor-model-parallel-size > 1")
    experts = f"{prefix}expert-model-parallel-size"
    if not shape.num_experts and p.expert_model_parallel_size > 1:
        found.append(f"{experts} must be 1 without experts, got {p.expert_model_parallel_size}")
    sharing = data_parallel_size * p.context_parallel_size
    if sharing % p.expert_model_parallel_size:
        found.append(
            f"{experts} must divide the {sharing} workers of data and context parallelism, got "
            f"{p.expert_model_parallel_size}"
        )
    return found


def _node_problems(config: Config, site: Site) -> list[str]:
    """What is to be on one node and is larger than it."""
    found, cluster, most = [], config.cluster, site.gpus_per_node
    if site.accelerator is None:
        return found
    if (cluster.num_workers_per_node or 0) > most:
        found.append(f"--num-workers-per-node ({cluster.num_workers_per_node}) is more than the {most} GPUs of a node")
    if not config.needs_engines or cluster.rollout_external_engine_addrs:
        return found
    for model in config.served_models:
        for group in model.groups:
            on_node = config.for_engine(model, group).cluster.engine_gpus_on_node
            if on_node > most:
                found.append(
                    f"{_size_flag(config, model)} puts {on_node} GPUs of an engine on one node, which has {most}: give "
                    f"--rollout-num-gpus-per-node {most}"
                )
    return found


def _length_problems(shape: ModelShape, config: Config) -> list[str]:
    longest = config.sampling.max_prompt_len + config.sampling.max_response_len
    is_set = any(word.startswith("--context-length") for word in config.engine.sglang_args)
    if is_set or shape.positions is None or longest <= shape.positions:
        return []
    return [f"--max-prompt-len + --max-response-len ({longest}) is more than the model's {shape.positions} positions"]


def _memory_problems(
    config: Config, site: Site, training: Memory, critic: Memory | None, engines: list[tuple[int, EnginePlan]]
) -> list[str]:
    if site.accelerator is None:
        return _cpu_problems(config, site, training, critic, engines)
    found = []
    for who, memory in (("training", training), ("the critic", critic)):
        if memory is not None and not memory.fits:
            _, largest = max((size, part) for part, size in memory.parts.items())
            found.append(
                f"{who} needs {memory.total_bytes / GIB:.1f} GiB on each GPU of {memory.available_bytes / GIB:.1f}; "
                f"the largest part is {largest}: {_cure(largest)}"
            )
    if not engines:
        return found
    engine = engines[0][1]
    longest = config.sampling.max_prompt_len + config.sampling.max_response_len
    if engine.kv_tokens < longest:
        found.append(
            f"an engine's cache holds {engine.kv_tokens:.0f} tokens beside the weights, less than one longest request "
            f"({longest}): more --rollout-num-gpus-per-engine, or a lower --max-response-len"
        )
    elif not engine.memory.fits:
        found.append(
            f"an engine needs {engine.memory.total_bytes / GIB:.1f} GiB on each GPU of "
            f"{engine.memory.available_bytes / GIB:.1f}: a lower --engine-mem-fraction"
        )
    return found


def _cure(part: str) -> str:
    return {
        "activations": "try --recompute-activations, a lower --max-tokens-per-worker, or more "
        "--context-parallel-size or --tensor-model-parallel-size with --sequence-parallel",
        "optimizer": "try more --train-num-workers (data-parallel workers share it)",
    }.get(part, "try a larger --tensor-model-parallel-size, --pipeline-model-parallel-size or, with experts, "
               "--expert-model-parallel-size; or --train-dtype bfloat16")  # fmt: skip


def _cpu_problems(
    config: Config, site: Site, training: Memory, critic: Memory | None, engines: list[tuple[int, EnginePlan]]
) -> list[str]:
    cluster = config.cluster
    total = cluster.train_num_workers * training.total_bytes + 2 * CPU_PROCESS_BYTES  # driver, rollout manager
    if critic is not None:
        total += config.critic.critic_num_workers * critic.total_bytes
    if engines:
        if not cluster.rollout_external_engine_addrs:
            total += sum(count * one.num_gpus * one.memory.total_bytes for count, one in engines)
        total += config.num_gpus_beside * CPU_PROCESS_BYTES  # and their weights, which are another model's
    if total <= site.memory_bytes:
        return []
    return [
        f"all processes together need {total / GIB:.1f} GiB of the machine's {site.memory_bytes / GIB:.1f}: try a "
        "lower --max-tokens-per-worker, --engine-max-total-tokens, --recompute-activations, or a smaller model"
    ]


def measured_rates(run_dir: Path, config: Config) -> tuple[Rates, Lengths]:
    """Rates and lengths of a finished or running run, scaled to the workers and engines of `config`.

    Raises:
        ValueError: no run there, or one without training steps, or without engines where `config` has some.
    """
    record = load_run(run_dir)
    samples = _count(record, "train", "rollout_batch_size") * _count(record, "train", "n_samples_per_prompt")
    lengths = Lengths(
        prompt=max(0.0, _mean(record, "train/tokens") / samples - _mean(record, "rollout/response_length_mean")),
        response=_mean(record, "rollout/response_length_mean"),
        longest=_mean(record, "rollout/response_length_max"),
    )
    engines = config.cluster.rollout_num_engines / _count(record, "cluster", "rollout_num_engines")
    workers = config.cluster.train_num_workers / _count(record, "cluster", "train_num_workers")
    train_tokens_s = workers * _mean(record, "train/tokens") / _mean(record, "timing_s/train")
    source = f"measured in {run_dir}, {record.num_steps} steps"
    if not config.needs_engines:
        none = math.inf  # what no engine samples takes no time
        rates = Rates(
            rollout_tokens_s=none, request_tokens_s=none, train_tokens_s=train_tokens_s, sync_s=0, source=source
        )
        return rates, lengths
    rates = Rates(
        rollout_tokens_s=engines * _mean(record, "rollout/tokens_per_s"),
        request_tokens_s=lengths.longest / _mean(record, "rollout/seconds"),
        train_tokens_s=train_tokens_s,
        sync_s=_mean(record, "timing_s/sync"),
        source=source,
    )
    return rates, lengths


def _count(record: RunRecord, section: str, field: str) -> float:
    """What a flag of the run was; 1 where its config.json does not tell."""
    return max(1.0, as_number(record.config.get(section, {}).get(field)) or 1.0)


def _mean(record: RunRecord, name: str) -> float:
    """Mean over the run without its first step, which also warms up."""
    values = record.series(name).values
    if not values:
        raise ValueError(f"--rates {record.folder}: no {name} in its metrics, so nothing can be learnt from that run")
    mean = fmean(values[1:] or values)
    if mean <= 0:
        raise ValueError(f"--rates {record.folder}: {name} must be > 0 on average, got {mean:g}")
    return mean
