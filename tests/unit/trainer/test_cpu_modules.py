"""The trainer's own modules for a CPU against plain torch."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_rl.trainer.device import prepare_process, resolve_device

prepare_process(resolve_device("cpu"), 0, 1, 1)

from slime_rl.trainer.cpu.adam import FusedAdam  # noqa: E402  (after the stand-ins)
from slime_rl.trainer.cpu.attention import PackedAttention  # noqa: E402


def attention() -> PackedAttention:
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None)
    one_worker = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    return PackedAttention(config, 1, None, "self", softmax_scale=0.25, pg_collection=one_worker)


def packed(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, heads, 16, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]


def test_attention_in_bfloat16_is_that_of_float32_rounded_once() -> None:
    lengths = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 12]))
    inputs = packed(torch.bfloat16)
    out = attention()(*inputs, packed_seq_params=lengths)
    out.sum().backward()
    exact = [x.detach().float().requires_grad_() for x in inputs]
    parts = zip(*(x.split([5, 7]) for x in exact), strict=True)
    wanted = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True, scale=0.25, enable_gqa=True
            ).transpose(0, 1)
            for part in parts
        ]
    )
    wanted.sum().backward()
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted.to(torch.bfloat16))
    for found, other in zip(inputs, exact, strict=True):
        assert found.grad is not None and other.grad is not None and found.grad.dtype == torch.bfloat16
        torch.testing.assert_close(found.grad.float(), other.grad, rtol=2**-7, atol=1e-6)


def test_adam_takes_the_steps_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = FusedAdam(ours, **options), torch.optim.AdamW(theirs, **options, foreach=False)  # type: ignore[arg-type]
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, first in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert not torch.equal(mine, first)
