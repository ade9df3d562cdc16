"""SGLang's torch_native attention with requests of like lengths in one call.

Theirs calls scaled_dot_product_attention for one request after the other in every layer, and for all positions of a
request where only its last token is new. On a CPU those calls were most of a decoding step of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from slime_rl.engine.cpu.batched_attention import attend, plan


class BatchedAttention(TorchNativeAttnBackend):
    """What is not plain causal self-attention is left to SGLang's own."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens.tolist()
        is_decoding = forward_batch.forward_mode.is_decode_or_idle()
        num_new = [1] * len(lengths) if is_decoding else forward_batch.extend_seq_lens.tolist()
        starts = [0, *torch.tensor(num_new).cumsum(0).tolist()[:-1]]
        assert self.req_to_token_pool is not None
        places = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : max(lengths, default=0)]
        self.blocks = plan(starts, num_new, lengths, places) if lengths else []

    def _run_sdpa_forward_extend(self, query: Tensor, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs["causal"] and self._is_plain(args, kwargs):
            return self._run(query, output, args, kwargs)
        return super()._run_sdpa_forward_extend(query, output, *args, **kwargs)

    def _run_sdpa_forward_decode(self, query: Tensor, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_plain(args, kwargs):
            return self._run(query, output, args, kwargs)
        return super()._run_sdpa_forward_decode(query, output, *args, **kwargs)

    def _is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        encoder_lengths = args[-1]
        return encoder_lengths is None and not kwargs["is_cross_attn"] and not self.use_sliding_window_kv_pool

    def _run(self, query: Tensor, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        key, value, *_ = args
        for block in self.blocks:
            attend(query, output, key, value, block, kwargs["scaling"], kwargs["sliding_window_size"])
        return output


def install() -> None:
    """Let `--attention-backend torch_native` mean this one."""
    register_attention_backend("torch_native")(BatchedAttention)
