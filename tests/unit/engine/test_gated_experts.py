from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import linear, sigmoid

from slime_rl.engine.cpu.gated_experts import add_gated, gated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_of_the_shared_expert_counts_by_its_gate(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, shared, routed = (torch.randn(5, 8, generator=generator).to(dtype) for _ in range(3))
    gate = torch.randn(1, 8, generator=generator).to(dtype)
    wanted = sigmoid(linear(hidden.float(), gate.float())) * shared.float()
    assert torch.equal(gated(hidden, gate[0], shared), wanted.to(dtype))
    total = routed.clone()
    add_gated(hidden, gate[0], shared, total)
    assert torch.allclose(total.float(), routed.float() + wanted, atol=0.05 if dtype == torch.bfloat16 else 1e-6)
    assert total.dtype == dtype


def test_parameters_are_named_as_sglang_calls_them() -> None:
    names = ["hidden_states", "gate_weight", "shared_output"]
    assert list(inspect.signature(gated).parameters) == names
    assert list(inspect.signature(add_gated).parameters) == [*names, "final_hidden_states"]
