"""Modules that Megatron does not have and some families need, and what puts them into a spec (`adjust_spec`)."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from slime_rl.trainer.cpu.norm import RMSNorm
from slime_rl.trainer.families.fields import Fields


def layer_specs(spec: Any) -> list[Any]:
    return list(spec.layer_specs)


def norm_over_heads(f: Fields, spec: Any) -> None:
    """Norm queries and keys over all heads together instead of head by head."""
    for layer in layer_specs(spec):
        attention = layer.submodules.self_attention.submodules
        for name, heads in (("q_layernorm", "num_attention_heads"), ("k_layernorm", "num_query_groups")):
            setattr(attention, name, ModuleSpec(module=NormOverHeads, params={"heads": heads}))


def norm_outputs(f: Fields, spec: Any) -> None:
    """Put an RMSNorm (`output_norm`) between each part of a dense layer and its residual."""
    for layer in layer_specs(spec):
        layer.submodules.self_attention.module = AttentionWithOutputNorm
        layer.submodules.mlp.module = MLPWithOutputNorm


class OutputNorm(RMSNorm):
    """An RMSNorm that is asked for its part of a checkpoint itself, as an MLP asks its parts."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Every worker holds the whole weight."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets)


class WithOutputNorm(torch.nn.Module):
    """Mixed into a part of a layer: its output is normed before the residual is added."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_norm = OutputNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return self.output_norm(output), bias


class AttentionWithOutputNorm(WithOutputNorm, SelfAttention): ...


class MLPWithOutputNorm(WithOutputNorm, MLP): ...


class PlainLayerNorm(torch.nn.Module):
    """LayerNorm without weight and bias."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, eps=self.eps).to(x.dtype)


class NormOverHeads(torch.nn.Module):
    """RMSNorm over the channels of all heads together, `[t, b, heads, d]`; the heads may be spread over workers."""

    def __init__(self, config: Any, hidden_size: int, heads: str, eps: float = 1e-5, **unused: Any) -> None:
        """`hidden_size` is that of one head, `heads` the field of `config` that counts them."""
        super().__init__()
        self.eps, self.group = eps, cast(dist.ProcessGroup, mpu.get_tensor_model_parallel_group())
        num_heads = getattr(config, heads) // dist.get_world_size(self.group)
        weight = torch.nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1  # type: ignore[attr-defined]
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        squares, count = flat.square().sum(-1, keepdim=True), flat.size(-1) * dist.get_world_size(self.group)
        if dist.get_world_size(self.group) > 1:
            squares = all_reduce(squares, group=self.group)
        normed = (flat * torch.rsqrt(squares / count + self.eps)).to(x.dtype)
        return (self.weight * normed).unflatten(-1, x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight is cut along its one axis over the tensor-parallel workers."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)
