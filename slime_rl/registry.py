"""Plugins by flag: a registered name or `package.module:attribute`, imported late and checked against its protocol."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExtensionPoint:
    """One flag that takes code. `builtins` maps short names to `module:attribute`, so listing costs no import."""

    flag: str
    protocol: type
    builtins: dict[str, str]

    def load(self, spec: str) -> Any:
        """The function or class that `spec` names.

        Raises:
            ValueError: unknown name, module that cannot be imported, missing attribute, or a signature that does not
                fit; the message names the flag, the value and what is expected.
        """
        target = self.builtins.get(spec, spec)
        module_name, colon, attribute = target.partition(":")
        if not colon or not module_name or not attribute:
            raise ValueError(f"{self.flag}: {spec!r} is not {self._choices()}{_suggest(spec, self.builtins)}")
        if "/" in module_name or module_name.endswith(".py"):
            module = module_name.removesuffix(".py").strip("./").replace("/", ".")
            raise ValueError(f"{self.flag}: {spec!r} names a file; give the module, as {module}:{attribute}")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # user code may raise anything at import
            raise ValueError(
                f"{self.flag}: cannot import {module_name!r} of {spec!r}: {type(error).__name__}: {error}; it must be "
                "importable from the folder the run starts in"
            ) from error
        value: Any = module
        for part in attribute.split("."):
            if not hasattr(value, part):
                known = [n for n in vars(module) if not n.startswith("_")]
                raise ValueError(f"{self.flag}: {module_name!r} has no {attribute!r}{_suggest(attribute, known)}")
            value = getattr(value, part)
        self.check(spec, value)
        return value

    def check(self, spec: str, value: Any) -> None:
        """Raise ValueError unless `value` can be called (or has the methods to be called) as the protocol says."""
        if not callable(value):
            raise ValueError(f"{self.flag}: {spec!r} is a {type(value).__name__}, not something that can be called")
        if "__call__" in vars(self.protocol):
            self._check_callable(spec, vars(self.protocol)["__call__"], _called(value))
            return
        for name, method in vars(self.protocol).items():
            if not inspect.isfunction(method) or (name.startswith("_") and name != "__len__"):
                continue
            if not callable(getattr(value, name, None)):
                raise ValueError(f"{self.flag}: {spec!r} has no method {name}{inspect.signature(method)}")
            of_class = inspect.isclass(value) and inspect.isfunction(inspect.getattr_static(value, name))
            self._check_callable(f"{spec}.{name}", method, getattr(value, name), int(of_class))

    def _check_callable(self, spec: str, expected: Any, target: Any, num_bound: int = 0) -> None:
        """`num_bound`: 1 for a method that is called on an instance, whatever it calls that."""
        want = list(inspect.signature(expected).parameters.values())
        try:
            have = inspect.signature(target)
        except (TypeError, ValueError):
            return  # a builtin without a signature; nothing to compare with
        names = [p.name for p in want if p.name != "self"]
        positional = [object()] * (len(names) + num_bound)
        wanted = f"({', '.join(names)})"
        try:
            have.bind(*positional)
        except TypeError as error:
            raise ValueError(f"{self.flag}: {spec!r} takes {have}, but it is called as {wanted}: {error}") from None
        if inspect.iscoroutinefunction(expected) and not inspect.iscoroutinefunction(target):
            raise ValueError(f"{self.flag}: {spec!r} must be `async def` and take {wanted}")
        if inspect.iscoroutinefunction(target) and not inspect.iscoroutinefunction(expected):
            raise ValueError(f"{self.flag}: {spec!r} must be a plain function (not async) and take {wanted}")

    def _choices(self) -> str:
        names = f"one of {', '.join(sorted(self.builtins))} or " if self.builtins else ""
        return f"{names}of the form package.module:name"


def _called(value: Any) -> Any:
    """What runs when `value` is called."""
    is_plain = inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, functools.partial)
    return value if is_plain else value.__call__


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def own_code(flag: str, where: str = "", explained: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Around a call of the user's code: what it raises becomes a ValueError with the flag, the error and the line.

    Errors of the types `explained` speak for themselves and pass, and so does Ctrl-C, which is not the code's doing.
    SystemExit and KeyboardInterrupt of the code itself do not: out of a coroutine they would end the event loop, and
    the run would wait for an answer for ever.
    """
    try:
        yield
    except explained:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and _may_be_ctrl_c():
            raise
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this one
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise ValueError(f"{flag} raised {type(error).__name__}: {error}{place}{where}") from error


def _may_be_ctrl_c() -> bool:
    """Python raises it in the main thread; an event loop there has its own way to end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread() is threading.main_thread()
    return False
