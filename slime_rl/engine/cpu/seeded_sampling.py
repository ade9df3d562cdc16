"""Makes SGLang on CPU honour the `sampling_seed` of a request.

It hands seeds to its sampler only with --enable-deterministic-inference, which refuses the CPU's attention. The sampler
itself can do it, so only that one question is answered differently here.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any


class _Seeded:
    """SGLang's execution settings, but for the one that lets seeds through."""

    deterministic = SimpleNamespace(enable_deterministic_inference=True)

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


def install() -> None:
    """After sglang's scheduler is imported, before it starts."""
    from sglang.srt.sampling import sampling_batch_info

    batch_info: Any = sampling_batch_info.SamplingBatchInfo
    original = batch_info.from_schedule_batch.__func__
    names = {**original.__globals__, "get_exec": lambda: _Seeded(sampling_batch_info.get_exec())}
    seeded = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    batch_info.from_schedule_batch = classmethod(seeded)
