"""What can be known before any process starts: the checks of every run; `--dry-run` prints them and the plan.

A run makes the quick checks and stops at the first failure. `--dry-run` makes all of them, says which could not be made
here (no weights, no GPU), prints what would run, and starts nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slime_rl.algorithms.registry import ADVANTAGES, OFF_POLICY, POLICY_LOSSES
from slime_rl.buffer.dumps import check_dump_folder, check_dumped_steps
from slime_rl.buffer.policies import BUFFER_FILTERS, BUFFERS, CURRICULA, PROMPT_SOURCES
from slime_rl.buffer.sources import check_first_rows, read_prompts
from slime_rl.buffer.sources.prompts import prompt_length_problem
from slime_rl.cluster.checkpoint import read_meta
from slime_rl.cluster.folders import check_folders, check_spared
from slime_rl.cluster.load_checks import check_loadable
from slime_rl.cluster.placement import check_colocation
from slime_rl.cluster.run_folder import outputs_in
from slime_rl.config import Config
from slime_rl.config.evaluation import for_evaluation
from slime_rl.config.model_folder import INDEX, TOKENIZER_FILES, check_model_files
from slime_rl.config.notes import config_notes
from slime_rl.data.rendering import load_tokenizer
from slime_rl.engine.arguments import (
    check_context_length,
    check_quantization,
    check_router_args,
    check_sglang_args,
    check_transfer,
    sglang_arguments,
)
from slime_rl.engine.device import engine_device
from slime_rl.engine.vocabulary import check_vocabulary
from slime_rl.observability.external_trackers import check_trackers
from slime_rl.observability.run_record import changed_flags
from slime_rl.observability.tracker import check_tensorboard
from slime_rl.plan.machine import check_gpus, check_processes
from slime_rl.plan.plan import find_lengths, find_site, make_plan, shape_problems
from slime_rl.plan.shape import read_shape
from slime_rl.plan.text import as_text
from slime_rl.rollout.agent.black_box import load_agent
from slime_rl.rollout.agent.environments import load_environment
from slime_rl.rollout.agent.tools import tool_set
from slime_rl.rollout.extra_metrics import LOG_FUNCTIONS
from slime_rl.rollout.group_loop import ROLLOUT_FUNCTIONS, rollout_function_name
from slime_rl.rollout.groups import GroupRunner, encode_prompt
from slime_rl.rollout.rewards.judge import read_rubric
from slime_rl.rollout.rewards.mixture import load_reward
from slime_rl.trainer.checks import check_architecture, check_trainer
from slime_rl.types import Prompt

PREFLIGHT_ROWS = 10_000  # read in a moment; a wrong key or format shows in the first ones
RENDERED_ROWS = 100
BACKENDS = ("megatron", "mbridge", "ray", "sglang", "sglang_router", "torch", "transformers")


class NotChecked(Exception):
    """A check that cannot be made here; the text says what is missing."""


Check = Callable[[Config], str | None]


def preflight(config: Config) -> None:
    """Make the quick checks.

    Raises:
        ValueError: the first thing that does not fit.
    """
    for check in QUICK.values():
        try:
            check(config)
        except NotChecked as missing:
            raise ValueError(str(missing)) from missing


def _engine_arguments(config: Config) -> str | None:
    groups = [group for model in config.served_models for group in model.groups]
    to_sglang = [*config.engine.sglang_args, *(word for group in groups for word in group.arguments)]
    for passed, package in ((to_sglang, "sglang"), (config.router.router_args, "sglang_router")):
        if passed and importlib.util.find_spec(package) is None:
            raise NotChecked(f"{package} is not installed here, and {passed[0]} is for it")
    check_sglang_args(config)
    check_router_args(config)
    passed = to_sglang or config.router.router_args
    return "asked the installed SGLang and sglang-router" if passed else "none passed through"


def _shared_router(config: Config) -> str | None:
    return check_vocabulary() if config.router.share_router and config.needs_engines else None


def _transfer(config: Config) -> str | None:
    if not any(model.is_disaggregated for model in config.served_models):
        return None
    device = _device(config)
    if device in ("cpu", "cuda"):
        check_transfer(config, device)
        return None
    return device


def _trainer(config: Config) -> str | None:
    check_trainer(config)
    return "asked the installed Megatron" if config.model.megatron_args else None


def _device(config: Config) -> str | None:
    if config.cluster.ray_address is not None:
        return f"decided by the Ray cluster at {config.cluster.ray_address}"
    try:
        return engine_device(config.cluster.device)
    except ValueError as error:
        raise NotChecked(str(error)) from error


def _model_files(config: Config) -> str | None:
    """Weights and tokenizer are whole. A folder without any weights is no fault of the flags: they may be elsewhere."""
    folders = {
        "--hf-checkpoint": config.model.hf_checkpoint,
        "--ref-load": config.model.ref_load,
        "--teacher-load": config.model.teacher_load,
        "--critic-load": config.critic.critic_load,
        **{f"--sglang-config: {m.name}": m.model_path for m in config.served_models if not m.is_policy},
    }
    for flag, path in folders.items():
        if path is None:
            continue
        if not any(Path(path).glob("*.safetensors")) and not (Path(path) / INDEX).is_file():
            raise NotChecked(f"{flag} {path}: must hold weights as *.safetensors, and there are none")
        check_model_files(flag, path, needs_tokenizer=flag.startswith(("--hf-checkpoint", "--sglang-config")))
    return None


def check_on_device(config: Config) -> None:
    """What depends on the device, once it is settled: a Ray cluster may have said so only now.

    Raises:
        ValueError: the first thing that does not fit.
    """
    check_transfer(config, config.cluster.device)
    check_quantization(config, config.cluster.device)


def _quantization(config: Config) -> str | None:
    return check_quantization(config, _with_local_device(config).cluster.device)


def _architecture(config: Config) -> str | None:
    if config.model.model_provider_path is not None or config.model.model_conversion_path != "families":
        return "left to --model-provider-path or --model-conversion-path"
    return check_architecture(config)


def _shape(config: Config) -> str | None:
    problems = shape_problems(read_shape(config.model.hf_checkpoint), config)
    if problems:
        raise ValueError("; ".join(problems))
    return None


def _machine(config: Config) -> str | None:
    """A private Ray has this machine alone; a cluster is asked when the run has joined it."""
    if config.cluster.colocate and config.needs_engines:
        check_colocation(config)
    device = _device(config)
    if device == "cuda":
        return check_gpus(config)
    return check_processes(_with_local_device(config)) if device == "cpu" else device


def _context(config: Config) -> str | None:
    if config.needs_engines:
        config = _with_local_device(config)
        policy = config.served_models[0]
        for group in policy.groups:
            check_context_length(config.for_engine(policy, group))
    return None


def _trackers(config: Config) -> str | None:
    check_tensorboard(config)
    check_trackers(config)
    return ", ".join(["metrics.jsonl", *["TensorBoard"] * config.logging.tensorboard, *config.logging.trackers])


def _checkpoint(config: Config) -> str | None:
    start, said = 0, "none to load"
    if config.checkpoint.load is not None:
        folder = check_loadable(config)
        start = 0 if config.checkpoint.finetune else read_meta(folder).step
        said = f"{folder}: {'its weights' if config.checkpoint.finetune else f'{start} finished steps'}"
    check_dumped_steps(config, start)
    check_dump_folder(config)
    return said


def _plugins(config: Config) -> str | None:
    GroupRunner(config)
    _check_chosen(config)
    for name, _ in config.evaluation.datasets:
        if (own := for_evaluation(config, name)) is not config:
            try:
                GroupRunner(own)
                _check_chosen(own)
            except ValueError as error:
                raise ValueError(f"--eval-override of {name}: {error}") from error
    loaded = []
    for point, name in (
        (ROLLOUT_FUNCTIONS, rollout_function_name(config)),
        (BUFFERS, config.buffer.buffer_path),
        (BUFFER_FILTERS, config.buffer.buffer_filter_path),
        (PROMPT_SOURCES, config.data.data_source_path),
        (CURRICULA, config.data.curriculum_path),
        (LOG_FUNCTIONS, config.logging.log_function_path),
        (ADVANTAGES, config.algorithm.advantage_estimator),
        (POLICY_LOSSES, config.algorithm.policy_loss),
        (OFF_POLICY, config.algorithm.off_policy_correction),
    ):
        if name is not None and name not in point.builtins:  # ours fit, and some of them import torch
            point.load(name)
            loaded.append(name)
    return ", ".join(loaded) or None


def _check_chosen(config: Config) -> None:
    """What the chosen built-in generate function or reward loads in turn, when the first sample needs it."""
    if config.rollout.generate_function_path == "environment_loop":
        load_environment(config)
    if config.rollout.generate_function_path == "gateway":
        load_agent(config)  # says so where there is none
    if config.agent.tools or config.agent.tool_config is not None:
        tool_set(config.agent).schemas(config.agent.tools, "--tools")
    if config.agent.agent_path is not None:
        load_agent(config)
    if config.reward.reward_function_path is None:
        if config.reward.rm_type == "mixture":
            for name, _ in config.reward.mixture_weights:
                load_reward(name)
        if config.reward.rm_type == "judge":
            read_rubric(config)


def _data(config: Config) -> str | None:
    if config.data.prompt_data is not None and config.needs_prompt_data:
        check_first_rows(config.data.prompt_data, config.data, "--prompt-data", PREFLIGHT_ROWS)
    for name, path in config.evaluation.datasets:
        check_first_rows(path, for_evaluation(config, name).data, "--eval-prompt-data", PREFLIGHT_ROWS)
    return f"the first {PREFLIGHT_ROWS} rows of each file"


def _tokenizer(config: Config) -> str | None:
    if not any((Path(config.model.hf_checkpoint) / name).is_file() for name in TOKENIZER_FILES):
        raise NotChecked(f"--hf-checkpoint {config.model.hf_checkpoint}: holds no tokenizer")
    tokenizer = load_tokenizer(config)
    if config.data.prompt_data is None or config.data.data_source_path != "file":
        return None
    prompts = read_prompts(config.data.prompt_data, config.data, "--prompt-data", limit=RENDERED_ROWS)
    lengths: list[int] = []

    def encode(prompt: Prompt) -> list[int]:
        tokens = encode_prompt(config, tokenizer, prompt.prompt, prompt.metadata)
        lengths.append(len(tokens))
        return tokens

    most, policy = config.sampling.max_prompt_len, config.data.long_prompt
    problems = [prompt_length_problem(prompt, encode, most, policy) for prompt in prompts]
    if None not in problems:
        # The run looks further, at more rows than a check should render.
        return f"all of {len(lengths)} prompts are over --max-prompt-len {most}, at least {min(lengths)} tokens"
    mean = sum(lengths) / len(lengths)
    return f"rendered {len(lengths)} prompts: {mean:.0f} tokens each, at most {max(lengths)}"


def _run_folder(config: Config) -> str | None:
    present = outputs_in(config.run_dir)
    if present and not config.logging.overwrite and (config.checkpoint.load is None or config.checkpoint.finetune):
        raise ValueError(f"--run-dir {config.run_dir} already holds a run ({', '.join(present)}); add --overwrite")
    if present and config.logging.overwrite:
        check_spared(config, [config.run_dir / name for name in present])
    return f"{config.run_dir}" + (", which is cleared first" if present and config.logging.overwrite else "")


def _folders(config: Config) -> str | None:
    check_folders(config)
    return None


QUICK: dict[str, Check] = {
    "arguments passed through": _engine_arguments,
    "shared router": _shared_router,
    "prefill and decode engines": _transfer,
    "trainer's plugins and arguments": _trainer,
    "device": _device,
    "model files": _model_files,
    "quantisation": _quantization,
    "parallel sizes": _shape,
    "size of the machine": _machine,
    "context length": _context,
    "trackers": _trackers,
    "checkpoint": _checkpoint,
    "folders to write to": _folders,
    "plugins": _plugins,
    "data": _data,
}
THOROUGH: dict[str, Check] = QUICK | {
    "architecture": _architecture,
    "tokenizer and prompts": _tokenizer,
    "run folder": _run_folder,
}


class Verdict(StrEnum):
    OK = "ok"
    NOT_CHECKED = "----"
    FAILED = "FAIL"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str


def run_checks(config: Config) -> list[Finding]:
    """Every check, also after one has failed."""
    findings = []
    for name, check in THOROUGH.items():
        try:
            findings.append(Finding(name, Verdict.OK, check(config) or ""))
        except NotChecked as missing:
            findings.append(Finding(name, Verdict.NOT_CHECKED, f"not checked: {missing}"))
        except ValueError as error:
            findings.append(Finding(name, Verdict.FAILED, str(error)))
        except Exception as error:  # a check that broke down: the others are to be seen all the same
            missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
            if missing in BACKENDS:
                findings.append(Finding(name, Verdict.NOT_CHECKED, f"not checked: {missing} is not installed here"))
            else:
                findings.append(Finding(name, Verdict.FAILED, f"{type(error).__name__}: {error}"))
    return findings


def dry_run(config: Config, gpu: str | None = None) -> tuple[str, bool]:
    """(text, whether nothing failed): flags, checks, notes, engine command and plan of a run that is not started.

    `gpu` is a kind of GPU that the plan is made for; what does not fit in memory is said but does not count as failed,
    since the GPUs of the run may be others.
    """
    findings = run_checks(config)
    config = _with_local_device(config)
    width = max(len(finding.name) for finding in findings)
    lines = ["flags that are not at their default"]
    lines += [f"  {flag} {value}" for flag, value in changed_flags(dataclasses.asdict(config))]
    lines += ["", "checks", *(f"  {f.verdict:<4}  {f.name:<{width}}  {f.text}".rstrip() for f in findings)]
    lines += [f"  note  {note}" for note in config_notes(config)]
    if config.needs_engines:
        device = "cpu" if config.cluster.device == "cpu" else "cuda"
        for model in config.served_models:
            for number, group in enumerate(model.groups):
                words = sglang_arguments(config.for_engine(model, group), 0, device, "HOST", 0)
                of = f"{model.name}, group {number}" if len(model.groups) > 1 else model.name
                lines += ["", f"arguments of the first engine of {of}", "  " + shlex.join(words)]
    failed = [finding.name for finding in findings if finding.verdict is Verdict.FAILED]
    try:
        plan = make_plan(config, find_site(config, gpu), find_lengths(config))
    except ValueError as error:
        return "\n".join([*lines, "", f"no plan: {error}", f"NOT READY: {', '.join([*failed, 'plan'])}"]), False
    lines.append(as_text(plan))
    lines.append(f"NOT READY: {', '.join(failed)}" if failed else "READY: nothing was started (--dry-run)")
    return "\n".join(lines), not failed


def _with_local_device(config: Config) -> Config:
    """--device auto as a run on this machine would settle it; a cluster elsewhere is taken to have GPUs."""
    if config.cluster.device != "auto" or config.cluster.ray_address is not None:
        return config
    device = engine_device("auto")
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device))
