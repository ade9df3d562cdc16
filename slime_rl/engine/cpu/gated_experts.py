"""The gate of a shared expert (Qwen2-MoE) in plain torch, where SGLang has a Triton kernel only."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor


def install() -> None:
    """Before sglang's models are imported: they take the functions by name."""
    kernels = importlib.import_module("sglang.kernels.ops.elementwise.elementwise")
    vars(kernels).update(fused_gate_sigmoid_mul=gated, fused_gate_sigmoid_mul_add=add_gated)


def gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor) -> Tensor:
    """`[t, h]`: the shared expert's output, each token's times the sigmoid of its hidden state along the gate."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float().flatten())
    return (gate[:, None] * shared_output.float()).to(shared_output.dtype)


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Add it to the routed experts' output, in place."""
    final_hidden_states.add_(gated(hidden_states, gate_weight, shared_output))
