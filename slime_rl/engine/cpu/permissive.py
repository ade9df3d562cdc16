"""Modules that import as if they were there: any attribute exists, decorators change nothing, nothing computes.

SGLang defines GPU kernels at import time. On CPU the definitions must go through; their bodies never run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any


class StandIn:
    """Base of every class taken from a permissive module, so that it can be subclassed with any keywords."""

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class PermissiveModule(types.ModuleType):
    """A module whose capitalised attributes are classes and whose other attributes are permissive modules again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"stand-in {self.__name__} has no {name}")
        full_name = f"{self.__name__}.{name}"
        value: Any
        if name[0].isupper():
            value = type(name, (StandIn,), {"__module__": self.__name__})
        else:
            value = sys.modules.get(full_name) or PermissiveModule(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator: bare, or after being called with options."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (StandIn,)


class PermissiveFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves `import NAME.anything` below one permissive package."""

    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PermissiveModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install(package: str, **attributes: Any) -> None:
    """Make `package` importable in this process, with `attributes` as the few parts that are real."""
    sys.meta_path.insert(0, PermissiveFinder(package))
    module = PermissiveModule(package)
    vars(module).update(attributes)
    sys.modules[package] = module
