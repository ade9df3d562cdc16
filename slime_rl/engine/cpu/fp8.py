"""SGLang's fp8 weights in blocks on a CPU: its own way packs them for AMX, and asserts that there is AMX.

Here they stay as the checkpoint and weight updates write them, and are multiplied by their scales whenever a layer is
used. Activations are not quantised, as they are on a GPU: an engine's log-probs are those of the dequantised weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_rl.data.fp8 import dequantize_blocks


def install() -> None:
    """After sglang's models are imported, before one is built."""
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.utils import weight_checker

    linear: Any = fp8.Fp8LinearMethod
    linear.process_weights_after_loading = _leave_as_they_are
    linear.apply = _linear
    experts: Any = fp8.Fp8MoEMethod
    experts.process_weights_after_loading = _leave_as_they_are
    experts.apply = _experts
    config: Any = fp8.Fp8Config
    config.get_supported_act_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.float16]
    # Checksums of the very bits. SGLang's are of bfloat16 products, for which it guesses the block from the columns.
    checker: Any = weight_checker
    checker.select_comparable_weight = lambda method: None


def _leave_as_they_are(method: Any, layer: Any) -> None:
    """Nothing to pack."""
    if method.weight_block_size is None:
        raise NotImplementedError("fp8 weights on CPU need a weight_block_size in quantization_config")


def _linear(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, columns = method.weight_block_size
    weight = dequantize_blocks(layer.weight, layer.weight_scale_inv, rows, columns, dtype=x.dtype)
    return F.linear(x, weight, bias)


class _Experts:
    """`[expert]` is its weight `[o, i]`: only those that a token chose are dequantised."""

    def __init__(self, weights: Tensor, scales: Tensor, block_size: list[int], dtype: torch.dtype) -> None:
        self.weights, self.scales, self.block_size, self.dtype = weights, scales, block_size, dtype

    def __getitem__(self, expert: int) -> Tensor:
        rows, columns = self.block_size
        return dequantize_blocks(self.weights[expert], self.scales[expert], rows, columns, dtype=self.dtype)


def _experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, size = dispatch_output.hidden_states, method.weight_block_size
    plain: Any = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_Experts(layer.w13_weight, layer.w13_weight_scale_inv, size, x.dtype),
        w2_weight=_Experts(layer.w2_weight, layer.w2_weight_scale_inv, size, x.dtype),
    )
    output = moe_forward_native(plain, x, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)
