"""A Ray session of our own: private folder and ports, gone when the run is gone; or an existing cluster by address."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from slime_rl.config import Config
from slime_rl.engine.process import SupervisedProcess
from slime_rl.engine.supervise import SGLANG_SHM_PREFIX

# Actors beside train workers and engines: the rollout manager, and one to spare for a plugin's own.
_OTHER_ACTORS = 2
# Ray gives up by itself when its daemons are not up within 30 s, which happens on a busy machine.
_START_TRIES = 3
_ANSWERS_WITHIN_S = 10.0
_PROBE_S = 30.0  # imports Ray


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Start or join Ray for the time of the block.

    A private session has only logical CPUs (workers are placed by count, threads are set by us), no dashboard and a
    folder of its own, so that two runs on one machine never meet. It lives below a supervisor: kill -9 of the driver
    ends all of it.

    Raises:
        RuntimeError: Ray did not start within --start-timeout-s; with its last log lines.
        ValueError: no cluster answers at --ray-address.
    """
    head = None
    address = config.cluster.ray_address
    if address is not None:
        check_cluster(address)
    else:
        _set_up_private()
        head, address = _start_head(config)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _own_signal_handlers():
            try:
                ray.init(address=address, namespace=f"slime_rl_{os.getpid()}", **options)
            except ConnectionError as error:
                if head is not None:
                    raise
                raise ValueError(f"--ray-address {address}: {error}") from error
        yield
    finally:
        ray.shutdown()
        if head is not None:
            head.stop(grace_s=0.1)  # nothing of value is in it; its own shutdown takes seconds


def check_cluster(address: str) -> None:
    """Check that a Ray cluster answers at HOST:PORT: `ray.init` would ask for minutes, and hear no signal meanwhile.

    Raises:
        ValueError: nothing answers there, or something that is no Ray cluster.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # auto, or what else Ray knows
    flag = f"--ray-address {address}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{flag}: nothing answers there ({error}); `ray status` on the head node shows whether it runs"
        ) from error
    probe = [sys.executable, "-c", "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])", address]
    try:
        answers = subprocess.run(probe, capture_output=True, timeout=_PROBE_S).returncode == 0
    except subprocess.TimeoutExpired:
        answers = False
    if not answers:
        raise ValueError(
            f"{flag}: what answers there is no Ray cluster, or one with another token; the port is that of `ray start "
            "--head --port`, not the dashboard's or the client's"
        )


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put SIGTERM and SIGINT back after the block: Ray's own handlers print a stack trace and leave no context."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_up_private() -> None:
    """Let only this run's processes join its Ray, without making or needing a token file in the user's home; and have
    it keep no history of calls, which nothing reads and which grows with the steps."""
    # No public call re-reads the settings after `import ray`.
    from ray._raylet import Config as RayConfig  # pyright: ignore[reportAttributeAccessIssue]

    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "RAY_task_events_report_interval_ms": "0",
    }
    RayConfig.initialize("")


def _start_head(config: Config) -> tuple[SupervisedProcess, str]:
    logs = config.run_dir / "logs"
    address_file = logs / "ray_address"
    head = SupervisedProcess(
        [
            *(sys.executable, "-m", "slime_rl.cluster.ray_head"),
            *map(str, (address_file, num_places(config), _object_store_bytes())),
        ],
        # Ray's workers, and so trainer and engines, would run at niceness 15 behind anything else on the machine.
        {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        logs / "ray.log",
        shm_prefix=SGLANG_SHM_PREFIX,  # Ray kills the supervisors of engines together with their workers
    )
    deadline = time.monotonic() + config.cluster.start_timeout_s
    for _ in range(_START_TRIES):
        address_file.unlink(missing_ok=True)
        head.start()
        while head.is_running() and time.monotonic() < deadline:
            if address_file.exists():
                return head, address_file.read_text()
            time.sleep(0.05)
    tail = head.tail(5)
    head.stop(grace_s=0.1)
    raise RuntimeError(f"Ray did not start; the end of {head.log_path}:\n{tail}")


def num_places(config: Config) -> int:
    """Logical CPUs of a private Ray: what `Placement` reserves, and the actors beside."""
    cluster = config.cluster
    engines = cluster.train_num_workers  # with --colocate their bundles have two for each worker
    if not cluster.colocate:
        engines = config.served_models[0].num_gpus
    return config.num_train_processes + engines + config.num_gpus_beside + _OTHER_ACTORS


def _object_store_bytes() -> int:
    """A tenth of the free shared memory, between 128 MiB and 8 GiB: batches are the only large objects."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 2**30
    return int(min(8 * 2**30, max(128 * 2**20, free // 10)))


def with_device(config: Config) -> Config:
    """Settle --device auto once for every process: cuda where the Ray cluster has GPUs, else cpu.

    Raises:
        ValueError: --device cuda on a cluster without GPUs.
    """
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if config.cluster.device == "cuda" and not has_gpus:
        raise ValueError("--device cuda: the Ray cluster has no GPU; use --device auto or cpu")
    device = "cuda" if has_gpus and config.cluster.device != "cpu" else "cpu"
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device))
