"""From a failure somewhere in the cluster to one line for the user."""

from __future__ import annotations

import traceback
from pathlib import Path

from ray.exceptions import RayActorError, RayTaskError


class TrainWorkerLost(RuntimeError):
    """The process of a train worker ended; the group must be built anew."""


class NoRestartLeft(RuntimeError):
    """A train worker was lost once more than --max-restarts allows."""


class NoPlace(RuntimeError):
    """Ray has had no place for a process for so long; it still waits for one."""


def no_place(limit_s: float) -> NoPlace:
    return NoPlace(f"Ray had no place for it within {limit_s:g} s; has a node been lost?")


def root_cause(error: BaseException) -> BaseException:
    """The error that started it: out of Ray's wrapper and out of exception groups."""
    while True:
        cause = getattr(error, "cause", None)
        if isinstance(error, RayTaskError) and isinstance(cause, BaseException):
            error = cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            return error


def explain(error: BaseException) -> tuple[str, bool]:
    """(one line, whether the user can mend it). ValueErrors and time-outs speak for themselves; others get a type."""
    cause = root_cause(error)
    text = str(cause).strip() or repr(cause)
    if isinstance(cause, (ValueError, TimeoutError)) and not isinstance(cause, UnicodeError):
        return text, True
    if isinstance(cause, RayActorError):
        first = text.splitlines()[0]
        return (
            f"a process of the run died: {first} See the logs folder of the run; out of memory is the usual reason.",
            False,
        )
    return f"{type(cause).__name__}: {text}", False


def write_error_log(folder: Path, error: BaseException) -> str:
    """The whole traceback, the workers' part included, as FOLDER/error.log; a line that says where it is.

    Where the folder cannot be written to (a full disk may be the very error) the traceback is in what is returned.
    """
    path = folder / "error.log"
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as problem:
        return f"the traceback cannot be written to {path} ({problem.strerror}):\n{text}"
    return f"the traceback is in {path}"
