"""The SGLang server on CPU: its child processes are forked from one that has imported everything already.

Forking instead of spawning halves start-up time and memory, and the children inherit the stand-ins. It is safe here
because there is no CUDA context, and no thread runs yet when SGLang starts its children.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
from pathlib import Path

from slime_rl.engine import traced_requests
from slime_rl.engine.cpu import imports, stand_ins

# Imported before the fork, so that the children share the pages.
SHARED_MODULES = (
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)


def serve(argv: list[str], *, seeded: bool, trace: Path | None = None) -> None:
    """Run the server with the arguments of `sglang.launch_server`; returns when it has shut down.

    With `seeded`, requests are sampled by their own `sampling_seed`. `trace` is where spans of requests go.
    """
    imports.keep_out_unused(_model_path(argv))
    stand_ins.install()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang forces "spawn" again
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("slime_rl.engine.cpu.gated_experts").install()
    for name in SHARED_MODULES:
        importlib.import_module(name)
    attention = importlib.import_module("slime_rl.engine.cpu.attention")
    attention.install()
    importlib.import_module("slime_rl.engine.cpu.fp8").install()
    importlib.import_module("slime_rl.engine.cpu.sampling").install()
    # On CPU SGLang collects garbage whenever it flushes its cache, as in every weight update: a walk of 0.3 s over all
    # that was ever made. The youngest objects are enough; what is imported is exempt, which keeps its pages shared.
    cpu_platform = importlib.import_module("sglang.srt.platforms.cpu")
    cpu_platform.CpuDeviceMixin.empty_cache = lambda self: gc.collect(0)
    gc.collect()
    gc.freeze()
    if seeded:
        from slime_rl.engine.cpu import seeded_sampling

        seeded_sampling.install()
    latent_attention = importlib.import_module("slime_rl.engine.cpu.latent_attention")
    if latent_attention.is_needed(_model_path(argv)):
        latent_attention.install()
    if any(argument.startswith("--disaggregation-mode") for argument in argv):
        disaggregation = importlib.import_module("slime_rl.engine.cpu.disaggregation")
        disaggregation.install()
    traced_requests.install(trace)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _model_path(argv: list[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    return parser.parse_known_args(argv)[0].model_path
