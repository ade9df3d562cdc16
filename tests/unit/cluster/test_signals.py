from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from slime_rl.cluster.signals import Terminated, leave_on_signals, signal_behind, signals_held


@pytest.fixture
def leaving() -> Iterator[None]:
    """This process has the handlers of a run."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    leave_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("leaving")
def test_a_signal_waits_for_the_end_of_what_must_not_be_broken_off() -> None:
    done = []
    with pytest.raises(Terminated), signals_held():
        with signals_held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


@pytest.mark.usefixtures("leaving")
def test_a_signal_counts_before_an_error_of_the_same_block() -> None:
    with pytest.raises(Terminated) as caught, signals_held():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("a worker is lost, which would start it anew")
    assert isinstance(caught.value.__context__, ValueError)


PROGRAM = """
import signal, sys, time
from slime_rl.cluster import signals
signals.PATIENCE_S = float(sys.argv[1])
signals.leave_on_signals()
try:
    print("ready", flush=True)
    time.sleep(600)
except (KeyboardInterrupt, signals.Terminated) as error:
    print(type(error).__name__, flush=True)
    sys.stdin.readline()  # it stops until it is told that it has stopped
    print("stopped", flush=True)
"""


def start(patience_s: float) -> subprocess.Popen[str]:
    arguments, pipe = [sys.executable, "-c", PROGRAM, str(patience_s)], subprocess.PIPE
    process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, preexec_fn=_hear_ctrl_c)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _hear_ctrl_c() -> None:
    """The tests may run in a shell's background, where it is ignored and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")], ids=["ctrl-c", "term"]
)
def test_a_second_signal_does_not_break_off_the_stopping(number: signal.Signals, name: str) -> None:
    process = start(600)
    process.send_signal(number)
    assert process.stdout is not None and process.stdout.readline() == f"{name}\n"
    for again in (signal.SIGINT, signal.SIGTERM, number):
        process.send_signal(again)
        time.sleep(0.05)
    assert process.communicate("\n", timeout=120)[0] == "stopped\n"
    assert process.returncode == 0


def test_a_stopping_that_hangs_can_be_ended() -> None:
    process = start(0)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "Terminated\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    assert process.returncode == 128 + signal.SIGINT


def test_a_signal_within_a_call_of_rays_is_a_signal() -> None:
    """ray.wait was ended by SIGTERM with `SystemError: … returned a result with an exception set`, and exit code 1."""

    def broken_off(cause: BaseException | None) -> SystemError:
        error = SystemError("<cyfunction CoreWorker.wait> returned a result with an exception set")
        error.__cause__ = cause
        return error

    assert signal_behind(broken_off(Terminated())) is signal_behind(Terminated()) is signal.SIGTERM
    assert signal_behind(broken_off(KeyboardInterrupt())) is signal_behind(KeyboardInterrupt()) is signal.SIGINT
    assert signal_behind(broken_off(None)) is signal_behind(broken_off(ValueError())) is None
    assert signal_behind(ValueError()) is None


def test_an_ignored_signal_stays_ignored() -> None:
    program = "import signal; from slime_rl.cluster.signals import leave_on_signals; "
    program += "signal.signal(signal.SIGINT, signal.SIG_IGN); leave_on_signals(); signal.raise_signal(signal.SIGINT)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_a_signal_while_python_ends_does_not_change_the_exit_code() -> None:
    code = """
import atexit, os, signal
from slime_rl.cluster.signals import exit_with
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
exit_with(130)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 130
