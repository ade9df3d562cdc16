"""The checks of scripts/gpu_smoke.sh: each is a process of its own with a deadline, and says PASSED, FAILED or SKIPPED.

device      torch sees a GPU; its name and memory
kernels     SGLang's and Transformer Engine's CUDA kernels load
trainer     a bfloat16 model is built of Transformer Engine layers; offload gives its memory back, onload brings the
            same weights again
colocated   three steps of GRPO on one GPU: engine and trainer take turns, weights go by CUDA IPC; the engine's
            log-probs agree with the trainer's in every step
in_flight   the same with requests that go on during updates (--rollout-ahead 1, --weight-update-mode in_place)
faults      the engine is killed during a run; it comes back with current weights
nccl        weights by NCCL to an engine on a second GPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BF16_GAP = 0.05  # nats, mean over tokens; bfloat16 engines and trainers differ by about a hundredth


class Skip(Exception):
    """What is missing."""


@dataclass(frozen=True)
class Place:
    """Where a check works: the tiny model with data, and a folder of its own."""

    data: Path
    folder: Path

    def train_flags(self, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "slime_rl.train", "--device", "cuda", "--train-dtype", "bfloat16"),
            *("--hf-checkpoint", str(self.data / "model"), "--prompt-data", str(self.data / "train.jsonl")),
            *("--rm-type", "exact", "--max-prompt-len", "32", "--max-response-len", "16", "--lr", "1e-4"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--engine-mem-fraction", "0.3"),
            *("--run-dir", str(self.folder / "run"), *more),
        ]


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def need_gpus(count: int) -> None:
    found = num_gpus()
    if found < count:
        raise Skip(f"needs {count} CUDA device{'s'[: count > 1]}, torch finds {found}")


def device(place: Place) -> str:
    need_gpus(1)
    import torch

    properties = torch.cuda.get_device_properties(0)
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    if not torch.isfinite(x @ x).all():
        raise RuntimeError("a bfloat16 matrix product is not finite")
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def kernels(place: Place) -> str:
    need_gpus(1)
    import importlib
    import importlib.metadata

    versions = []
    for package in ("sgl_kernel", "transformer_engine.pytorch", "sglang", "megatron.core"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise Skip(f"{error.name} is not installed: pip install -e '.[gpu]'") from error
    for name in ("sglang", "transformer-engine", "megatron-core"):
        versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(versions)


TRAINER = """
import sys, torch
from slime_rl.config import parse_config
from slime_rl.engine.ports import free_port
from slime_rl.trainer.worker import TrainWorker
worker = TrainWorker(parse_config(sys.argv[1:]), 0, 1, "127.0.0.1", free_port())
layers = [type(m).__module__ for model in worker.state.models for m in model.modules()]
assert any("transformer_engine" in name for name in layers), "no layer is of Transformer Engine"
first = {name: tensor.clone().cpu() for name, tensor in worker.export_weights()}
used = torch.cuda.memory_allocated()
worker.offload()
left = torch.cuda.memory_allocated()
worker.onload()
again = {name: tensor.cpu() for name, tensor in worker.export_weights()}
assert all(torch.equal(first[name], again[name]) for name in first), "onload changed weights"
assert left < 0.2 * used, f"offload left {left} of {used} bytes"
print(f"offload left {left / 2**20:.1f} of {used / 2**20:.1f} MiB; {len(first)} tensors came back bit for bit")
"""


def trainer(place: Place) -> str:
    kernels(place)
    flags = place.train_flags()[3:]
    return run([sys.executable, "-c", TRAINER, *flags], place, 150).splitlines()[-1]


def metrics_of(place: Place) -> list[dict[str, float]]:
    lines = (place.folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "train/loss" in line]


def agree(place: Place, num_steps: int) -> str:
    """Every step's log-prob gap between engine and trainer is that of bfloat16."""
    steps = metrics_of(place)
    gaps = [line["train/logprob_diff_mean_abs"] for line in steps]
    if len(steps) != num_steps or max(gaps) > BF16_GAP:
        raise RuntimeError(f"{len(steps)} of {num_steps} steps, log-prob gaps {gaps}, allowed {BF16_GAP}")
    sync_s = max(line["sync/seconds"] for line in steps)
    return f"{num_steps} steps, log-prob gap at most {max(gaps):.4f}, weight sync at most {sync_s:.2f} s"


def colocated(place: Place) -> str:
    kernels(place)
    run(place.train_flags("--colocate", "--num-steps", "3"), place, 150)
    return agree(place, 3)


def in_flight(place: Place) -> str:
    kernels(place)
    more = ("--colocate", "--num-steps", "3", "--rollout-ahead", "1", "--weight-update-mode", "in_place")
    run(place.train_flags(*more), place, 120)
    return f"{len(metrics_of(place))} steps"


def faults(place: Place) -> str:
    kernels(place)
    import psutil

    quick = ("--engine-health-interval-s", "1", "--engine-health-timeout-s", "20")
    process = start(place.train_flags("--colocate", "--num-steps", "12", *quick), place)
    killed, deadline = False, time.monotonic() + 170
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not finished in time; see {place.folder}")
            path = place.folder / "run" / "metrics.jsonl"
            if not killed and path.exists() and '"step": 2' in path.read_text():
                for child in psutil.Process(process.pid).children(recursive=True):
                    if "sglang::scheduler" in " ".join(child.cmdline()):
                        child.kill()
                        killed = True
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    if process.returncode != 0 or not killed:
        raise RuntimeError(f"exit code {process.returncode}, killed: {killed}; see {place.folder}")
    restarts = metrics_of(place)[-1]["faults/engine_restarts"]
    if restarts < 1:
        raise RuntimeError("the run ended before the engine was missed")
    return f"{restarts:.0f} restart; {agree(place, 12)}"


def nccl(place: Place) -> str:
    need_gpus(2)
    kernels(place)
    run(place.train_flags("--weight-sync", "distributed", "--num-steps", "3"), place, 150)
    return agree(place, 3)


CHECKS: dict[str, Callable[[Place], str]] = {
    check.__name__: check for check in (device, kernels, trainer, colocated, in_flight, faults, nccl)
}


def start(command: list[str], place: Place) -> subprocess.Popen[bytes]:
    place.folder.mkdir(parents=True, exist_ok=True)
    with (place.folder / "output").open("ab") as output:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def run(command: list[str], place: Place, limit_s: float) -> str:
    """Output of a command. RuntimeError with its end when it fails or takes too long."""
    process = start(command, place)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        code = None
    text = (place.folder / "output").read_text(errors="replace")
    if code != 0:
        what = f"no end within {limit_s:g} s" if code is None else f"exit code {code}"
        raise RuntimeError(f"{what}; the end of {place.folder / 'output'}:\n{text[-1500:]}")
    return text.strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="keep runs and logs here (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    args = parser.parse_args(argv)
    folder = args.output or Path(tempfile.mkdtemp(prefix="gpu_smoke_"))
    if num_gpus() > 0:
        from tools.make_quickstart import main as make_quickstart

        make_quickstart(["--output", str(folder / "data")])
    verdicts = []
    for name in args.only:
        started = time.monotonic()
        try:
            verdict, text = "PASSED", CHECKS[name](Place(folder / "data", folder / name))
        except Skip as reason:
            verdict, text = "SKIPPED", str(reason)
        except Exception as error:  # a check must not hide those after it
            verdict, text = "FAILED", f"{type(error).__name__}: {error}"
        verdicts.append(verdict)
        print(f"{verdict:<7} {name:<10} {time.monotonic() - started:6.1f} s  {text}", flush=True)
    print(" ".join(f"{verdict.lower()}={verdicts.count(verdict)}" for verdict in ("PASSED", "FAILED", "SKIPPED")))
    if args.output is None and "FAILED" not in verdicts:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if "FAILED" in verdicts else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
