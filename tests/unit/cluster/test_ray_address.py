from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import wait_for

from slime_rl import doctor
from slime_rl.cluster import ray_session
from slime_rl.cluster.ray_session import check_cluster


def test_an_address_where_nothing_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets this port, and it listens to nobody
        port = silent.getsockname()[1]
        with pytest.raises(ValueError, match=f"--ray-address 127.0.0.1:{port}: nothing answers there .*refused"):
            check_cluster(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match=r"--ray-address no-such-host\.invalid:6379: nothing answers there"):
        check_cluster("no-such-host.invalid:6379")


def test_an_address_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "_PROBE_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"--ray-address 127.0.0.1:{port}: what answers there is no Ray cluster"):
            check_cluster(f"127.0.0.1:{port}")


def test_a_private_ray_is_private_whatever_cluster_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, as Ray's sockets must be
        address = Path(folder) / "address"
        command = [sys.executable, "-m", "slime_rl.cluster.ray_head", str(address), "1", "80000000"]
        head = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder})
        try:
            wait_for(lambda: address.exists() or head.poll() is not None)
            assert address.read_text() != "127.0.0.1:1"
        finally:
            head.terminate()
            head.wait()
    assert doctor._ray().verdict is doctor.Verdict.OK
