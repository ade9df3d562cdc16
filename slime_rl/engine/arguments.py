"""Command lines of the SGLang server and the router; checks what `--sglang-*` and `--router-*` add to them."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from slime_rl.config import Config
from slime_rl.config.evaluation import for_evaluation
from slime_rl.config.quantization import (
    FIELD,
    check_engine_blocks,
    quantization_entry,
    quantized_weights,
    read_quantization,
)
from slime_rl.config.served_models import FLAG, TRANSFER_ARGUMENT, value_of, worker_type_of
from slime_rl.engine.control import WEIGHT_RECEIVER
from slime_rl.engine.device import engine_device
from slime_rl.engine.environment import engine_environment
from slime_rl.engine.ports import free_port

CHECK_TIMEOUT_S = 300.0  # importing sglang takes 10 s, on a busy machine with a cold disk minutes
MOONCAKE = "mooncake"
CPU_KV_TOKENS = 32768
CPU_PREFILL_TOKENS = 512  # as fast by token as more would be
CPU_MEM_FRACTION = 0.8  # an upper bound only: the KV cache is sized by tokens, and its pages come as they are used

# Fields of SGLang's ServerArgs that this room sets, and the flag of ours that decides them.
OURS_IN_SGLANG = {
    "model_path": "--hf-checkpoint",
    "tokenizer_path": "--hf-checkpoint",
    "trust_remote_code": "--trust-remote-code",
    "device": "--device",
    "dtype": "--engine-dtype",
    "tp_size": "--rollout-num-gpus-per-engine",
    "mem_fraction_static": "--engine-mem-fraction",
    "max_total_tokens": "--engine-max-total-tokens",
    "random_seed": "--seed",
    "host": "",
    "port": "",
    "base_gpu_id": "",
    "weight_version": "",
    "custom_weight_loader": "",
    "api_key": "--engine-api-key-file",
    "quantization": f"{FIELD} in config.json of --hf-checkpoint",  # else a running engine takes no new weights
    "nnodes": "--rollout-num-gpus-per-node",
    "node_rank": "",
    "dist_init_addr": "",
    "disaggregation_mode": "worker_type in --sglang-config",
    "disaggregation_bootstrap_port": "",
    "pp_size": "--rollout-num-gpus-per-engine",  # an engine has so many GPUs, and as many ranks get weights
    "skip_tokenizer_init": "",  # answers would have no text
    "config": "--sglang-NAME, or overrides in --sglang-config",  # what it holds would pass by these checks
}
# Of these, what a group in --sglang-config may set for its own engines: its arguments come after ours and win.
FREE_IN_GROUPS = ("dtype", "mem_fraction_static", "max_total_tokens")
FREE_BESIDE_THE_POLICY = ("quantization",)
OURS_IN_ROUTER = {
    "policy": "--router-policy",
    "request_timeout_secs": "--request-timeout-s",
    "host": "",
    "port": "",
    "prometheus_host": "",
    "prometheus_port": "",
    "worker_urls": "",
    "pd_disaggregation": "worker_type in --sglang-config",
    "enable_igw": "--share-router",
    "prefill": "",
    "decode": "",
    "api_key": "--engine-api-key-file",
}


def sglang_arguments(config: Config, index: int, device: Literal["cpu", "cuda"], host: str, port: int) -> list[str]:
    """Arguments of engine `index`; the user's own come last and win."""
    engine = config.engine
    arguments = {
        "model-path": config.model.hf_checkpoint,
        "host": host,
        "port": port,
        "device": device,
        "dtype": engine_dtype(config, device),
        "tp-size": config.cluster.rollout_num_gpus_per_engine,
        "random-seed": config.train.seed + index,
        "mem-fraction-static": engine.engine_mem_fraction,
        "max-total-tokens": engine.engine_max_total_tokens,
        "weight-version": 0,
        "log-level": "info",
        "log-level-http": "warning",
    }
    switches = ["--skip-server-warmup"]
    if config.model.trust_remote_code:
        switches.append("--trust-remote-code")
    if config.rollout.weight_update_mode == "in_place":
        # Without retraction the cache cannot be emptied at an update, and old prefixes would serve new requests. The
        # overlapped schedule reports the new version one token early.
        switches += ["--disable-radix-cache", "--disable-overlap-schedule"]
    if device == "cuda" and config.cluster.colocate:
        switches.append("--enable-memory-saver")
    if device == "cpu":
        arguments["attention-backend"] = "torch_native"
        arguments["mem-fraction-static"] = engine.engine_mem_fraction or CPU_MEM_FRACTION
        arguments["max-total-tokens"] = engine.engine_max_total_tokens or CPU_KV_TOKENS
        # Prefill in small pieces, one prompt of a kind first: the other samples of its group find it in the cache.
        arguments["schedule-policy"], arguments["chunked-prefill-size"] = "lpm", CPU_PREFILL_TOKENS
        # An idle engine must not burn a core, and there is no GPU to overlap with.
        switches += ["--sleep-on-idle", "--disable-overlap-schedule"]
    if config.train.deterministic:
        # Shapes of matrix products, and with them the last bits, must not depend on what else is running. On CUDA that
        # is this mode's work; on CPU one request runs at a time and none starts from another's cache.
        switches += ["--enable-deterministic-inference"] if device == "cuda" else ["--disable-radix-cache"]
        if device == "cpu":
            arguments["max-running-requests"] = 1
    switches.append(f"--custom-weight-loader={WEIGHT_RECEIVER}")
    pairs = [f"--{name}={value}" for name, value in arguments.items() if value is not None]
    return [*pairs, *dict.fromkeys(switches), *engine.sglang_args]


def engine_dtype(config: Config, device: str) -> str:
    """What activations, and weights that are not quantised, are computed in. SGLang's fp8 knows no float32 on a GPU."""
    if config.engine.engine_dtype != "auto":
        return config.engine.engine_dtype
    half = device == "cuda" and quantization_entry(config.model.hf_checkpoint) is not None
    return "bfloat16" if half else config.model.train_dtype


def check_quantization(config: Config, device: str) -> str | None:
    """Check that folders are stored in a form that is known, and that SGLang can serve and update the policy's.

    Raises:
        ValueError: with the field of config.json and its value.
    """
    folders = (config.model.ref_load, config.model.teacher_load, config.critic.critic_load)
    for folder in filter(None, folders):
        quantized_weights(folder)
    path = config.model.hf_checkpoint
    blocks, weights = read_quantization(path), quantized_weights(path)
    if blocks is None:
        return None
    if config.needs_engines:
        for size in config.served_models[0].sizes:
            check_engine_blocks(path, size, on_cuda=device == "cuda")
        if device == "cuda" and config.engine.engine_dtype == "float32":
            raise ValueError(
                f"--engine-dtype must be bfloat16 or float16 where {path}/config.json has a {FIELD}, got float32"
            )
    return f"fp8 in blocks of {blocks.rows}x{blocks.columns}: {len(weights)} weights"


def disaggregation_arguments(config: Config, device: Literal["cpu", "cuda"], host: str) -> list[str]:
    """What a prefill or decode engine is told beside its mode: where decode engines find it; how it keeps what gives
    way to others without pinned memory."""
    kind = worker_type_of(config.engine.sglang_args)
    if kind == "prefill":
        return [f"--disaggregation-bootstrap-port={free_port(host)}"]
    return ["--disaggregation-decode-retraction-backup=cpu_tensor"] if (kind, device) == ("decode", "cpu") else []


def check_transfer(config: Config, device: str) -> None:
    """Check that prefill engines have a way to send KV caches to decode engines.

    Raises:
        ValueError: none that works on this device, or Mooncake, SGLang's default, is not installed.
    """
    for model in (model for model in config.served_models if model.is_disaggregated):
        passed = config.for_engine(model, model.groups[0]).engine.sglang_args  # the same in all groups
        backend = value_of(TRANSFER_ARGUMENT, passed) or MOONCAKE
        where = f"{FLAG} {config.engine.sglang_config}: {model.name}"
        if backend == "fake" or (device == "cpu" and not backend.startswith(MOONCAKE)):
            why = "sends no caches" if backend == "fake" else "does not work on CPU"
            raise ValueError(f"{where}: {TRANSFER_ARGUMENT} must not be {backend}, which {why}")
        if device == "cuda" and backend.startswith(MOONCAKE) and importlib.util.find_spec("mooncake") is None:
            raise ValueError(
                f"{where}: prefill and decode engines need Mooncake (pip install mooncake-transfer-engine), or another "
                f"{TRANSFER_ARGUMENT} in the overrides of every group"
            )


def check_sglang_args(config: Config) -> None:
    """Check `--sglang-*` and the overrides in --sglang-config against the installed SGLang. Costs its import in a
    process of its own, but only when given.

    Raises:
        ValueError: unknown name, bad value, or a name that a flag of ours decides.
    """
    _ask_sglang(config, config.engine.sglang_args, OURS_IN_SGLANG)
    groups = {(m.name, m.is_policy, group.arguments): None for m in config.served_models for group in m.groups}
    for model, is_policy, arguments in groups:
        free = FREE_IN_GROUPS if is_policy else (*FREE_IN_GROUPS, *FREE_BESIDE_THE_POLICY)
        try:
            _ask_sglang(config, arguments, {f: flag for f, flag in OURS_IN_SGLANG.items() if f not in free})
        except ValueError as error:
            raise ValueError(f"{FLAG} {config.engine.sglang_config}: {model}: overrides: {error}") from error
    for model in config.served_models:
        where = "--sglang-*: " if config.engine.sglang_config is None else f"{FLAG}: {model.name}: "
        for group in model.groups:
            _check_replicas(where, config.for_engine(model, group).engine.sglang_args)


def _ask_sglang(config: Config, passed: Sequence[str], ours: dict[str, str]) -> None:
    if not passed:
        return
    # Of this machine: the arguments are the same where the engines are to run.
    device = "cpu" if config.cluster.device == "cpu" else engine_device("auto")
    command = [sys.executable, "-m", "slime_rl.engine.launch_engine", "check", device, "--model-path=unused", *passed]
    answer = subprocess.run(
        command, env=engine_environment(device), capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
    )
    if answer.returncode != 0:
        raise ValueError(f"--sglang-*: the installed SGLang cannot be asked about arguments:\n{answer.stderr[-2000:]}")
    found = json.loads(answer.stdout.splitlines()[-1])
    _check_passed("sglang", passed, found["options"], found["unknown"], found["error"], ours)


def _check_replicas(where: str, passed: Sequence[str]) -> None:
    """One engine is one copy of the model; attention may be split over its GPUs by requests."""
    splits = value_of("--attn-dp-size", passed) is not None or "--enable-dp-attention" in passed
    for name in ("--dp-size", "--data-parallel-size"):
        copies = value_of(name, passed)
        if copies not in (None, "1") and not splits:
            raise ValueError(
                f"{where}{name} must be 1 without --enable-dp-attention, since copies of the model need GPUs that an "
                f"engine has not; give --rollout-num-engines, got {copies}"
            )


def check_router_args(config: Config) -> None:
    """Check `--router-*` against the installed sglang-router.

    Raises:
        ValueError: unknown name, bad value, or a name that a flag of ours decides.
    """
    passed = config.router.router_args
    if not passed:
        return
    from sglang_router.router_args import RouterArgs

    parser = _RaisingParser(allow_abbrev=False, add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    options = {option: action.dest for action in parser._actions for option in action.option_strings}
    unknown, error = [], None
    try:
        _, unknown = parser.parse_known_args(list(passed))
    except ValueError as failure:
        error = str(failure)
    _check_passed("router", passed, options, unknown, error, OURS_IN_ROUTER)


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _check_passed(
    prefix: str,
    passed: Sequence[str],
    options: dict[str, str],
    unknown: Sequence[str],
    error: str | None,
    ours: dict[str, str],
) -> None:
    """Turn what the program's own parser says into an error about our flags."""
    for argument in passed:
        name = argument.split("=")[0]
        if not name.startswith("--"):
            continue
        flag = f"--{prefix}-{name.removeprefix('--')}"
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean --{prefix}-{close[0].removeprefix('--')}?" if close else ""
            raise ValueError(f"{flag}: the installed {_program(prefix)} has no argument {name}{hint}")
        if options[name] in ours:
            decided_by = ours[options[name]]
            instead = f"use {decided_by}" if decided_by else "the run chooses it"
            raise ValueError(f"{flag} cannot be passed through: {instead}")
    if error is not None:
        raise ValueError(f"--{prefix}-*: {_program(prefix)} refuses {' '.join(passed)}: {error}")
    if unknown:
        raise ValueError(f"--{prefix}-*: {_program(prefix)} does not understand {unknown[0]!r} in {' '.join(passed)}")


def _program(prefix: str) -> str:
    return {"sglang": "SGLang", "router": "sglang-router"}[prefix]


def check_context_length(config: Config) -> None:
    """Check that a whole sequence fits into the positions and the KV cache of an engine with this config. Models beside
    the policy get sequences of other lengths.

    Raises:
        ValueError: names --max-prompt-len, the longest response of training or any evaluation set, and the limit.
    """
    sampling = config.sampling
    sets = [for_evaluation(config, name).evaluation for name, _ in config.evaluation.datasets]
    longest = max(sampling.max_response_len, *(one.eval_max_response_len or 0 for one in (config.evaluation, *sets)))
    needed = sampling.max_prompt_len + longest
    lengths = f"--max-prompt-len + the longest response ({sampling.max_prompt_len} + {longest} = {needed})"
    positions, source = _model_positions(config)
    if positions is not None and needed > positions:
        raise ValueError(f"{lengths} is more than the {positions} positions of the model ({source})")
    given = value_of("--max-total-tokens", config.engine.sglang_args)
    cache = int(given) if given is not None else config.engine.engine_max_total_tokens
    if cache is None and config.cluster.device == "cpu" and not config.cluster.rollout_external_engine_addrs:
        cache = CPU_KV_TOKENS
    if cache is not None and needed > cache:
        raise ValueError(
            f"{lengths} is more than the tokens of an engine's cache (--engine-max-total-tokens), got {cache}"
        )


def _model_positions(config: Config) -> tuple[int | None, str]:
    """Longest sequence the model is made for, and who says so."""
    given = value_of("--context-length", config.engine.sglang_args)
    if given is not None:
        return int(given), "--sglang-context-length"
    path = Path(config.model.hf_checkpoint) / "config.json"
    content = json.loads(path.read_text())
    positions = {**content, **(content.get("text_config") or {})}.get("max_position_embeddings")
    return positions, f"max_position_embeddings in {path}"
