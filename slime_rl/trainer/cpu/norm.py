"""RMSNorm that Megatron's local layer specs can use with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Marks its weight so that Megatron sums the gradient over tensor-parallel workers; WrappedTorchNorm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
