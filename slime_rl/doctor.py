"""What this machine offers for a run, and what to do about what is missing.

    python -m slime_rl.doctor [--json]

Looks at the machine (cores, memory, disk, shared memory, GPUs, ports), at every package that a run imports, and starts
a small Ray. Imports run in processes of their own: one that crashes or hangs is a finding, not the end of the doctor.
Exit code 0 when a CPU or GPU run is possible, else 1. It needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from slime_rl.observability.streams import say

GIB = 1024**3
IMPORT_TIMEOUT_S = 240.0  # importing sglang takes 10 s, on a busy machine with a cold disk a minute
RAY_TIMEOUT_S = 90.0


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warn"  # a run is possible, with a limit
    PROBLEM = "FAIL"  # no run is possible


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor; `remedy` says what to do and is empty when nothing is."""

    topic: str
    name: str
    verdict: Verdict
    value: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One distribution and how to see that it works: `code` runs in a process of its own."""

    distribution: str
    code: str
    needed: bool = True  # no run without it
    remedy: str = ""


BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, ARM
INSTALL_CPU = "run `bash scripts/install_cpu.sh`"
INSTALL_GPU = "run `pip install -e .[gpu]`"
# The engine's stand-ins leave a package alone that imports, so the same code fits CPU and GPU.
SGLANG_CODE = (
    "from slime_rl.engine.cpu import stand_ins; stand_ins.install(); "
    "import sglang.launch_server, sglang.srt.managers.scheduler"
)
SGLANG_GPU_CODE = "import sglang.launch_server, sglang.srt.managers.scheduler"
# As the trainer does it: the hook stands in for CUDA and Transformer Engine only where they are missing.
TRAINER_CODE = (
    "import torch; from slime_rl.trainer.cpu import proxy; proxy.install(without_cuda=not torch.cuda.is_available()); "
)


def packages(on_gpu: bool) -> list[Package]:
    """What a run imports on this kind of machine."""
    te_remedy = f"training attention runs without it, but slower: {INSTALL_GPU}" if on_gpu else ""
    return [
        Package(distribution="torch", code="import torch; torch.ones(2, 2) @ torch.ones(2, 2)"),
        Package(distribution="transformers", code="import transformers; transformers.AutoTokenizer"),
        Package(distribution="megatron-core", code=TRAINER_CODE + "import megatron.core.models.gpt"),
        Package(distribution="mbridge", code=TRAINER_CODE + "import mbridge"),
        Package(distribution="ray", code="import ray"),
        Package(distribution="sglang", code=SGLANG_GPU_CODE if on_gpu else SGLANG_CODE),
        Package(distribution="sglang-router", code="import sglang_router"),
        *(
            Package(distribution=name, code=f"import {module}")
            for name, module in [
                *(("aiohttp", "aiohttp.web"), ("jsonschema", "jsonschema"), ("numpy", "numpy"), ("psutil", "psutil")),
                *(("pyarrow", "pyarrow.parquet"), ("pyyaml", "yaml"), ("starlette", "starlette.applications")),
                ("uvicorn", "uvicorn"),
            ]
        ),
        Package(distribution="math-verify", code="import math_verify"),
        Package(distribution="safetensors", code="import safetensors.torch"),
        Package(distribution="rich", code="import rich.live"),
        Package(distribution="matplotlib", code="from matplotlib.figure import Figure"),
        Package(
            distribution="transformer-engine",
            code="import transformer_engine.pytorch",
            needed=False,
            remedy=te_remedy,
        ),
        Package(
            distribution="tensorboard",
            code="import torch.utils.tensorboard",
            needed=False,
            remedy="only --tensorboard needs it: run `pip install tensorboard`",
        ),
    ]


def examine(folder: Path, *, with_ray: bool = True) -> list[Finding]:
    """Every finding, machine first; `folder` is where runs would be written."""
    gpus = find_gpus()
    on_gpu = bool(gpus) and _torch_sees_cuda()
    findings = [*_system(), *_resources(folder), _gpu_finding(gpus, on_gpu), _ports()]
    with ThreadPoolExecutor(max_workers=2) as pool:  # imports mostly wait for the disk; more would only crowd two cores
        findings += pool.map(lambda package: check_package(package, on_gpu), packages(on_gpu))
    if with_ray:
        findings.append(_ray())
    return findings


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    fits = sys.version_info >= (3, 11)
    remedy = "" if fits else "use Python 3.11 or newer: megatron-core and sglang need it"
    yield _finding("system", "Python", fits, f"{version} ({sys.executable})", remedy)
    linux = sys.platform == "linux"
    remedy = "" if linux else "run on Linux (WSL counts): SGLang and Ray's process handling need it"
    yield _finding("system", "operating system", linux, f"{platform.system()} {platform.release()}", remedy)


def _resources(folder: Path) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield _limit("cores", cores, fewest=1, comfortable=2, unit="", remedy="engine and trainer will share one core")
    yield Finding(topic="system", name="bfloat16 products", verdict=Verdict.OK, value=_bfloat16())
    if Path("/proc/meminfo").is_file():  # not on a system that is none for a run
        memory = _memory_limit_bytes() / GIB
        remedy = "use a smaller model, or --rollout-num-engines 1 and --train-num-workers 1"
        yield _limit("memory available", memory, fewest=3, comfortable=8, unit="GiB", remedy=remedy)
    yield _disk(folder)
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / GIB
        remedy = "Ray and weight sync pass data through /dev/shm: start the container with --shm-size=4g or more"
        yield _limit("shared memory free", shared, fewest=0.06, comfortable=1, unit="GiB", remedy=remedy)


def _disk(folder: Path) -> Finding:
    """Room where runs would be written, and whether that folder can be written to at all."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        remedy = "call it from a folder that can be written to, or put --run-dir into one"
        value = f"{folder} cannot be written to: {error.strerror}"
        return Finding(topic="system", name="run folder", verdict=Verdict.WARNING, value=value, remedy=remedy)
    remedy = "free space, or put --run-dir on another disk; checkpoints hold about 16 bytes per parameter"
    return _limit(f"disk free at {folder.resolve()}", free, fewest=1, comfortable=5, unit="GiB", remedy=remedy)


def _bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Whether the cores multiply bfloat16 themselves."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    if own := sorted(flags & BFLOAT16_FLAGS):
        return f"{', '.join(own)}: --train-dtype bfloat16 makes CPU runs of larger models faster"
    return "not on these cores: float32 is as fast on a CPU"


def _memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that is available, or what the container's limit leaves when that is less; files cached there give way."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    limit, used, parts = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        split = [line.split() for line in parts.read_text().splitlines()] if parts.is_file() else []
        cached = sum(int(words[1]) for words in split if words[0] in ("active_file", "inactive_file"))
        available = min(available, int(text) - int(used.read_text()) + cached)
    return available


def find_gpus() -> list[str]:
    """Name and memory of every NVIDIA GPU that the driver shows."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    outcome = run_program(query, timeout_s=20)
    return [line.strip() for line in outcome.output.splitlines() if line.strip()] if outcome.ok else []


def _gpu_finding(gpus: list[str], on_gpu: bool) -> Finding:
    if not gpus:
        value = "none: runs use the CPU, with gloo and SGLang's torch_native attention"
        return Finding(topic="device", name="GPUs", verdict=Verdict.OK, value=value)
    if on_gpu:
        return Finding(topic="device", name="GPUs", verdict=Verdict.OK, value="; ".join(gpus))
    return Finding(
        topic="device",
        name="GPUs",
        verdict=Verdict.WARNING,
        value=f"{'; '.join(gpus)}, but torch finds no CUDA device",
        remedy=f"runs will use the CPU; for the GPU install a CUDA build of torch: {INSTALL_GPU}",
    )


def _ports() -> Finding:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(8)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        value = "the system hands out free ports, e.g. " + ", ".join(str(s.getsockname()[1]) for s in sockets[:3])
        return Finding(topic="network", name="ports", verdict=Verdict.OK, value=value)
    except OSError as error:
        remedy = "allow listening on 127.0.0.1 (sandbox or firewall rules): engines, router and Ray need it"
        return Finding(topic="network", name="ports", verdict=Verdict.PROBLEM, value=str(error), remedy=remedy)
    finally:
        for item in sockets:
            item.close()


def check_package(package: Package, on_gpu: bool) -> Finding:
    """Version of a distribution, and whether its import works."""
    remedy = package.remedy or (INSTALL_GPU if on_gpu else INSTALL_CPU) * package.needed
    bad = Verdict.PROBLEM if package.needed else Verdict.WARNING if remedy else Verdict.OK
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return _package_finding(package, bad, "not installed" + (", not needed here" if not remedy else ""), remedy)
    # Importing needs neither a GPU nor compilation; both only cost time here.
    environment = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "" if on_gpu else "1"}
    start = time.monotonic()
    outcome = run_program(_python(package.code), timeout_s=IMPORT_TIMEOUT_S, environment=environment)
    if outcome.ok:
        return _package_finding(package, Verdict.OK, f"{version}, imports in {time.monotonic() - start:.1f} s", "")
    return _package_finding(package, bad, f"{version}, does not import: {outcome.last_line}", remedy)


def _package_finding(package: Package, verdict: Verdict, value: str, remedy: str) -> Finding:
    return Finding(topic="packages", name=package.distribution, verdict=verdict, value=value, remedy=remedy)


def _torch_sees_cuda() -> bool:
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return run_program(_python(code), timeout_s=IMPORT_TIMEOUT_S).ok


def _ray() -> Finding:
    code = (
        "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False, "
        "logging_level='ERROR', object_store_memory=80_000_000); "
        "assert ray.get(ray.remote(lambda: 41).remote()) == 41; ray.shutdown()"
    )
    start = time.monotonic()
    outcome = run_program(_python(code), timeout_s=RAY_TIMEOUT_S)
    if outcome.ok:
        value = f"starts and runs a task in {time.monotonic() - start:.1f} s"
        return Finding(topic="network", name="Ray", verdict=Verdict.OK, value=value)
    remedy = "the host name must resolve to an address of this machine (see /etc/hosts) and local ports must be open"
    return Finding(topic="network", name="Ray", verdict=Verdict.PROBLEM, value=outcome.last_line, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended; `output` holds standard output and error."""

    ok: bool
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"


def run_program(command: Sequence[str], *, timeout_s: float, environment: dict[str, str] | None = None) -> Outcome:
    """Run a program in a session of its own; after `timeout_s` it and all its children are killed."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {}), "PYTHONPATH": _python_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_tree(process)
        return Outcome(ok=False, output=f"no answer after {timeout_s:.0f} s")
    return Outcome(ok=process.returncode == 0, output=output or f"exit code {process.returncode}")


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process, its group, and descendants that have left the group, as Ray's do."""
    descendants = _descendants(process.pid)  # it is there until we have waited for it
    os.killpg(process.pid, signal.SIGKILL)
    for child in descendants:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    process.communicate()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is walked
        found += children.get(child, ())
    return found


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _python_path() -> str:
    """Import path with this package's root in front, wherever the doctor is called from."""
    root = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)


def _finding(topic: str, name: str, fits: bool, value: str, remedy: str) -> Finding:
    verdict = Verdict.OK if fits else Verdict.PROBLEM
    return Finding(topic=topic, name=name, verdict=verdict, value=value, remedy=remedy)


def _limit(name: str, have: float, *, fewest: float, comfortable: float, unit: str, remedy: str) -> Finding:
    value = f"{have:.1f} {unit}" if unit else f"{have:.0f}"
    if have >= comfortable:
        return Finding(topic="system", name=name, verdict=Verdict.OK, value=value)
    verdict = Verdict.WARNING if have >= fewest else Verdict.PROBLEM
    wanted = f"{comfortable:g} {unit}".strip()
    return Finding(topic="system", name=name, verdict=verdict, value=f"{value} (better {wanted})", remedy=remedy)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings for people: one line each, remedies below, the verdict last."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines.append(f"{topic}:")
        for finding in (f for f in findings if f.topic == topic):
            lines.append(f"  {finding.verdict:<4}  {finding.name:<{width}}  {finding.value}")
            if finding.remedy:
                lines.append(f"        {'':<{width}}  -> {finding.remedy}")
    problems = [finding.name for finding in findings if finding.verdict is Verdict.PROBLEM]
    lines.append(f"NOT READY: {', '.join(problems)}" if problems else f"READY for a run on {_kind(findings)}")
    return "\n".join(lines)


def _kind(findings: Sequence[Finding]) -> str:
    device = next(finding for finding in findings if finding.topic == "device")
    return "GPU" if device.verdict is Verdict.OK and not device.value.startswith("none") else "CPU"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime_rl.doctor", description="What this machine offers for a run."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--no-ray", action="store_true", help="do not start Ray to see whether it can")
    args = parser.parse_args(argv)
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # nothing can be imported from there, so there is nothing more to find out
        findings = [_finding("system", "current folder", False, "it was removed", "cd into a folder that is there")]
    else:
        findings = examine(folder, with_ray=not args.no_ray)
    ready = all(finding.verdict is not Verdict.PROBLEM for finding in findings)
    if args.json:
        say(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        say(as_text(findings))
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
