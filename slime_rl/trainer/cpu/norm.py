"""Norms that Megatron's local layer specs can use with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Marks its weight so that Megatron sums the gradient over tensor-parallel workers; WrappedTorchNorm refuses.

    With layernorm_zero_centered_gamma the weight is counted from 1.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm with the same mark."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
