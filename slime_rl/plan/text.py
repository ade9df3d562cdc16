"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config, ParallelConfig
from slime_rl.observability.wording import duration
from slime_rl.plan.hardware import GIB
from slime_rl.plan.memory import Memory
from slime_rl.plan.plan import Plan, engine_counts
from slime_rl.plan.speed import forward_passes


def as_text(plan: Plan) -> str:
    """Sections with aligned names; problems last, so that they are what stays on the screen."""
    sections = [_sizes(plan), _memory("each training worker", plan.training)]
    if plan.critic is not None:
        sections.append(_memory("each critic worker", plan.critic))
    if plan.engine is not None:
        what = "each engine GPU" if plan.site.accelerator else "each engine"
        smallest = " (the smallest engine)" if len(plan.config.served_models[0].sizes) > 1 else ""
        sections.append(_memory(what + smallest, plan.engine.memory))
    sections += [_work(plan), _time(plan)]
    lines = [line for title, rows in sections for line in _section(title, rows)]
    lines.append("")
    lines += [f"DOES NOT FIT: {problem}" for problem in plan.problems] or ["FITS"]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """Numbers only, with units in the names."""
    found: dict[str, Any] = {
        "fits": not plan.problems,
        "problems": plan.problems,
        "parameters": plan.shape.parameters,
        "active_parameters": plan.shape.active_parameters,
        "num_gpus": plan.num_gpus,
        "training_bytes": plan.training.parts,
        "critic_bytes": plan.critic.parts if plan.critic else {},
        "engine_bytes": plan.engine.memory.parts if plan.engine else {},
        "kv_cache_tokens": plan.engine.kv_tokens if plan.engine else 0,
        "micro_batches": plan.micro_batches,
        "pipeline_idle_share": plan.pipeline_idle,
    }
    if plan.step is not None:
        step = plan.step
        found["step"] = {
            "rollout_s": step.rollout_s,
            "train_s": step.train_s,
            "sync_s": step.sync_s,
            "step_s": step.step_s,
            "staleness": step.staleness,
            "trainer_idle_share": step.trainer_idle,
            "engines_idle_share": step.engines_idle,
        }
    return found


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return ["", title, *(f"  {name:<{width}}  {value}" for name, value in rows)]


def _sizes(plan: Plan) -> tuple[str, list[tuple[str, str]]]:
    shape, config, p = plan.shape, plan.config, plan.config.parallel
    experts = f", {shape.num_experts} experts, {shape.experts_per_token} a token" if shape.num_experts else ""
    active = f", {_billions(shape.active_parameters)} used by a token" if shape.num_experts else ""
    rows = [
        ("model", f"{shape.model_type}, {shape.num_layers} layers, hidden {shape.hidden_size}{experts}"),
        ("parameters", f"{_billions(shape.parameters)}{active}"),
        ("training", _group(config.cluster.train_num_workers, config.data_parallel_size, p, bool(experts))),
    ]
    if config.critic_is_apart:
        workers, size = config.critic.critic_num_workers, config.critic_data_parallel_size
        rows.append(("critic", _group(workers, size, config.critic_parallel, bool(experts))))
    if plan.engine is not None:
        units = (" GPU", " GPUs") if plan.site.accelerator else (" process", " processes")
        rows.append(("engines", engine_counts(config, *units)))
    if plan.site.accelerator is not None:
        nodes = f"{_count(plan.num_nodes, 'node')} of {plan.site.gpus_per_node}"
        rows.append(("GPUs", f"{plan.num_gpus} x {plan.site.accelerator.name} ({nodes})"))
    return "sizes", rows


def _group(workers: int, data_parallel_size: int, p: ParallelConfig, has_experts: bool) -> str:
    return (
        f"{_count(workers, 'worker')} = {data_parallel_size} data x {p.tensor_model_parallel_size} tensor x "
        f"{p.pipeline_model_parallel_size} pipeline x {p.context_parallel_size} context"
        + f", experts over {p.expert_model_parallel_size}"
        * has_experts
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s'[: number != 1]}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _memory(what: str, memory: Memory) -> tuple[str, list[tuple[str, str]]]:
    rows = [(part, f"{size / GIB:8.2f} GiB") for part, size in memory.parts.items()]
    share = memory.total_bytes / memory.available_bytes
    rows.append(("total", f"{memory.total_bytes / GIB:8.2f} GiB of {memory.available_bytes / GIB:.2f} ({share:.0%})"))
    return f"memory of {what}", rows


def _work(plan: Plan) -> tuple[str, list[tuple[str, str]]]:
    train, lengths = plan.config.train, plan.lengths
    per_worker = train.samples_per_update / plan.config.data_parallel_size
    rows = [
        (
            "a step",
            f"{train.rollout_batch_size} prompts x {train.n_samples_per_prompt} samples = {train.samples_per_rollout} "
            f"samples, in {_count(train.num_updates_per_rollout, 'update')}"
            + f", {train.num_epochs_per_rollout} times over"
            * (train.num_epochs_per_rollout > 1),
        ),
        ("lengths", f"prompt {lengths.prompt:.0f}, response {lengths.response:.0f} (longest {lengths.longest:.0f})"),
        ("an update", f"{per_worker:g} samples a data-parallel worker, in micro-batches: {plan.micro_batches}"),
        ("passes", f"{forward_passes(plan.config):g} forward passes a token and step (a backward pass counts two)"),
    ]
    if plan.config.parallel.pipeline_model_parallel_size > 1:
        rows.append(("pipeline", f"{plan.pipeline_idle:.1%} idle (fewer with more micro-batches)"))
    if plan.engine is not None:
        at_once = plan.engine.kv_tokens / lengths.sequence
        rows.append(("KV cache", f"{plan.engine.kv_tokens:,.0f} tokens an engine, {at_once:,.0f} such samples at once"))
    return "work", rows


def _time(plan: Plan) -> tuple[str, list[tuple[str, str]]]:
    step, rates = plan.step, plan.rates
    if (step is None or rates is None) and plan.site.accelerator is not None:
        return "time", [("not known", "the engines have no room for a request, see below")]
    if step is None or rates is None:
        return "time", [("not known", "give --gpu NAME, or --rates RUN_DIR of a run on this kind of machine")]
    rows = [
        ("from", rates.source),
        ("train", f"{duration(step.train_s):>12}   {rates.train_tokens_s:,.0f} tokens/s"),
    ]
    if plan.engine is not None:
        rows[1:1] = [("rollout", f"{duration(step.rollout_s):>12}   {rates.rollout_tokens_s:,.0f} response tokens/s")]
        rows += [
            ("weight sync", f"{duration(step.sync_s):>12}"),
            ("step", f"{duration(step.step_s):>12}   with {_mode(plan.config)}"),
            ("trainers idle", f"{step.trainer_idle:>12.0%}"),
            ("engines idle", f"{step.engines_idle:>12.0%}"),
            ("staleness", f"{step.staleness:>12.2f}   weight versions, when a response begins"),
        ]
    return "time of a step (an estimate: good for comparing layouts, not for promises)", rows


def _mode(config: Config) -> str:
    """The flags that let rollout and training overlap."""
    if config.asynchrony.is_continuous:
        return f"--fully-async --max-staleness {config.asynchrony.max_staleness}"
    return f"--rollout-ahead {config.rollout.rollout_ahead}"
