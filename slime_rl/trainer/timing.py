"""Seconds spent in the phases of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime_rl.observability.trace import NO_TRACE, Trace


class PhaseTimer:
    """Adds up wall time by phase; on CUDA each ends with a synchronisation, so that it pays for its own kernels."""

    def __init__(self, device: torch.device, trace: Trace = NO_TRACE) -> None:
        self._device, self._trace = device, trace
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._trace.span("training", name):
            try:
                yield
            finally:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
