from __future__ import annotations

import os
import signal
import subprocess
import sys

from processes import state_of, wait_for

from slime_rl.cluster.pulse import Pulse, end_process, start_pulse

PROGRAM = """
from slime_rl.cluster.pulse import start_pulse
print(start_pulse("127.0.0.1", "node").port, flush=True)
while True:
    pass
"""


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) == "T")


def test_a_busy_process_beats_and_a_stopped_or_ended_one_does_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pulse = Pulse("127.0.0.1", int(process.stdout.readline()), process.pid, "node")
        assert pulse.beats(60)
        stop(process.pid)
        assert not pulse.beats(0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert pulse.beats(60)
        stop(process.pid)
        end_process(pulse.pid)
        assert process.wait(60) == -signal.SIGKILL
        assert not pulse.beats(0.3)
        end_process(pulse.pid)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_one_that_says_nothing_does_not_block_the_next() -> None:
    import socket

    pulse = start_pulse("127.0.0.1", "node")
    with socket.create_connection((pulse.host, pulse.port)):
        assert pulse.beats(60)
