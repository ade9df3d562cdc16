"""How a run is asked to end: the first Ctrl-C or SIGTERM leaves through the contexts, so that everything is stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 20.0  # leaving takes a second or two


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it passes every `except Exception` on its way out."""


def leave_on_signals() -> None:
    """Raise KeyboardInterrupt or Terminated in the main thread at the first signal.

    Further ones are not to break off what is being stopped: they are passed over, unless that takes longer than
    PATIENCE_S; then the process ends at once, and the supervisors end everything below it.
    """
    began: float | None = None

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal began
        if began is None:
            began = time.monotonic()
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        if time.monotonic() - began > PATIENCE_S:
            os._exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as of a shell's background job
            signal.signal(number, leave)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that come within the block take effect at its end: what it does must not be broken off half way.

    Once PATIENCE_S have passed since the first of them, a further one ends the process at once.
    """
    ours = [n for n in SIGNALS if callable(signal.getsignal(n))]
    if not ours or threading.current_thread() is not threading.main_thread():  # only there they are handled
        yield
        return
    came: list[tuple[int, float]] = []

    def hold(number: int, _: FrameType | None) -> None:
        if came and time.monotonic() - came[0][1] > PATIENCE_S:
            os._exit(128 + number)
        came.append((number, time.monotonic()))

    before = [signal.signal(number, hold) for number in ours]
    try:
        yield
    finally:
        for number, handler in zip(ours, before, strict=True):
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0][0])


def signal_behind(error: BaseException) -> signal.Signals | None:
    """The signal that `error` came of; None where it is an error of its own.

    Where a signal comes within a call of Ray's, Cython makes a SystemError of what the handler raises.
    """
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return signal.SIGTERM if isinstance(error, Terminated) else None


def exit_with(code: int) -> NoReturn:
    """Leave Python with this exit code, which no further signal changes: Python drops handlers at its end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a tool's `main` and exit with its code; after Ctrl-C or SIGTERM, once it has cleaned up, with a shell's."""
    leave_on_signals()
    try:
        code = main()
    except (KeyboardInterrupt, Terminated) as error:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        print(f"ended by {number.name}", file=sys.stderr)
        code = 128 + number
    exit_with(code)
