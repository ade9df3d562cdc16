"""Causal attention in plain torch for packed sequences, and the layer spec that uses it.

Megatron's own local attention has no packing. One scaled_dot_product_attention for neighbours of the same length is the
fastest on a CPU: no padding, no `[T, T]` mask, and few calls where many short sequences are packed by length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from slime_rl.trainer.cpu.norm import LayerNorm, RMSNorm
from slime_rl.trainer.shared_prompts import SharedPromptParams


class PackedAttention(torch.nn.Module):
    """Core attention for THD (packed) and SBHD, grouped queries and MLA, context parallelism by gathering keys.

    Shapes: t tokens of this worker, h heads, d channels. With n context-parallel workers, worker r holds chunks r and
    2n-1-r of the 2n chunks of every sequence.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None  # tokens a query sees, its own included

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`[t, h, d]` -> `[t, h, dv]` with packed_seq_params, else `[s, b, h, d]` -> `[s, b, h*dv]`.

        With SharedPromptParams `[t, 1, h, d]` -> `[t, 1, h*dv]`.
        """
        if isinstance(packed_seq_params, SharedPromptParams):
            return self._shared(query[:, 0], key[:, 0], value[:, 0], packed_seq_params).flatten(1)[:, None]
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.diff().tolist())
        s, b = query.shape[:2]
        flat = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(*flat, lengths=[s * self.cp_group.size()] * b)
        return out.reshape(b, s, -1).transpose(0, 1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        if self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, lengths)
        blocks = [(len(list(equal)), length, length) for length, equal in itertools.groupby(lengths)]
        return self._blocks(query, key, value, blocks)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, params: SharedPromptParams) -> Tensor:
        assert params.key_order is not None
        key, value = (x.index_select(0, params.key_order) for x in (key, value))
        return self._blocks(query, key, value, params.blocks)

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[tuple[int, int, int]]) -> Tensor:
        """Attention block by block of (sequences, queries, keys of each), which follow each other."""
        # Split, not sliced: the gradient of a slice is as large as all tokens, for each of them.
        queries = query.split([count * num_queries for count, num_queries, _ in blocks])
        keys, values = (x.split([count * num_keys for count, _, num_keys in blocks]) for x in (key, value))
        outputs = []
        for (count, num_queries, num_keys), q, k, v in zip(blocks, queries, keys, values, strict=True):
            q, k, v = q.unflatten(0, (count, num_queries)), *(x.unflatten(0, (count, num_keys)) for x in (k, v))
            outputs.append(self._attend(q, k, v).flatten(0, 1))
        return torch.cat(outputs)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        n, rank = self.cp_group.size(), self.cp_group.rank()
        all_keys, all_values = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group).unflatten(0, (n, -1))
            for x in (key, value)
        )
        outputs, at = [], 0
        for length in lengths:
            chunk = length // (2 * n)
            k, v = (_in_order(x, at, chunk) for x in (all_keys, all_values))
            for index, start in ((rank, at), (2 * n - 1 - rank, at + chunk)):
                end = (index + 1) * chunk
                outputs.append(self._attend(query[None, start : start + chunk], k[None, :end], v[None, :end])[0])
            at += 2 * chunk
        return torch.cat(outputs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of `q [n, sq, h, d]`, the end of the span of `k [n, sk, hk, d]` -> `[n, sq, h, dv]`."""
        num_queries, num_keys = q.size(1), k.size(1)
        mask = None
        is_windowed = self.window is not None and num_keys > self.window
        if num_queries != num_keys or is_windowed:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
        if mask is not None and self.window is not None:
            mask = mask.triu(num_keys - num_queries - self.window + 1)
        dtype = q.dtype
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if q.device.type == "cpu":  # torch's backward in bfloat16 takes four times as long there
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).to(dtype)


def _in_order(gathered: Tensor, at: int, chunk: int) -> Tensor:
    """The whole sequence from the two chunks that each worker `[n, t, h, d]` holds from `at` on."""
    first = [part[at : at + chunk] for part in gathered]
    second = [part[at + chunk : at + 2 * chunk] for part in gathered]
    return torch.cat(first + second[::-1])


def use_local_modules(spec: Any, normalization: str = "RMSNorm") -> Any:
    """Put the attention and norm of this folder into get_gpt_decoder_block_spec(use_transformer_engine=False)."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
    for layer in getattr(spec, "layer_specs", [spec]):
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        for submodules in (layer.submodules, attention):
            for name, value in vars(submodules).items():
                if value is WrappedTorchNorm:
                    setattr(submodules, name, norm)
        if hasattr(attention, "linear_kv_down_proj"):
            from megatron.core.post_training.modelopt.layers import Linear

            # Replicated, as Transformer Engine's spec has it: the column-parallel one of the local spec forgets to sum
            # the gradient of the shared rotary key over the tensor-parallel workers.
            multi_latent_attention.Linear = attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    if hasattr(spec, "layer_norm"):
        spec.layer_norm = norm
    return spec
