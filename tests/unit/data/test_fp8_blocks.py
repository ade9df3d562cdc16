from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_rl.data.fp8 import E4M3, dequantize_blocks, quantize_blocks

SHAPES = [(128, 128), (256, 384), (200, 130), (1, 1), (129, 127), (7, 500)]


def draw(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Values of many sizes: the largest of a block is far from most others."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source) * torch.exp(3 * torch.randn(shape, generator=source))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (16, 48)])
def test_error_is_half_a_step_of_e4m3(shape: tuple[int, int], block: tuple[int, int], power_of_two: bool) -> None:
    weight = draw(shape)
    q, scale = quantize_blocks(weight, *block, power_of_two=power_of_two)
    assert (q.dtype, q.shape, scale.dtype) == (E4M3, shape, torch.float32)
    assert scale.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    bound = torch.maximum(weight.abs() / 16, each / 1024) * (1 + 1e-6)
    error = (dequantize_blocks(q, scale, *block, dtype=torch.float32) - weight).abs()
    assert bool((error <= bound).all())
    assert q.float().abs().max() <= 448
    if power_of_two:
        assert bool((torch.frexp(scale).mantissa == 0.5).all())


def test_the_largest_value_of_a_block_becomes_448() -> None:
    weight = draw((256, 256))
    q, _ = quantize_blocks(weight, 128, 128)
    assert q.float().abs().view(2, 128, 2, 128).amax(dim=(1, 3)).eq(448).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantised_once_stays_as_it_is(dtype: torch.dtype) -> None:
    q, scale = quantize_blocks(draw((300, 260)), 128, 128)
    again, scale_again = quantize_blocks(dequantize_blocks(q, scale, 128, 128, dtype=dtype), 128, 128)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.allclose(scale_again, scale, rtol=2.0**-23 if dtype is torch.float32 else 2.0**-8, atol=0)


def test_zeros_have_scale_1_and_tiny_values_do_not_overflow() -> None:
    weight = torch.zeros(4, 4)
    weight[2:, 2:] = 1e-43  # denormal: 448 of such steps make no float32 scale
    weight[2:, :2] = 3e38
    q, scale = quantize_blocks(weight, 2, 2)
    assert scale[0].tolist() == [1.0, 1.0] and bool((q[:2].float() == 0).all())
    assert bool(q.float().isfinite().all()) and bool(scale.isfinite().all())
    assert bool((q[2:, :2].float() == 448).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.ones(5, 5)
    weight[3, 4] = bad
    with pytest.raises(ValueError, match="values must be finite to be stored as fp8, 1 of 25 are not"):
        quantize_blocks(weight, 2, 2)


def test_a_part_is_dequantised_by_the_scales_of_its_place() -> None:
    q, scale = quantize_blocks(draw((200, 130)), 64, 32)
    whole = dequantize_blocks(q, scale, 64, 32, dtype=torch.float32)
    part = dequantize_blocks(q[70:190, 33:], scale, 64, 32, at=(70, 33), dtype=torch.float32)
    assert torch.equal(part, whole[70:190, 33:])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_values_are_those_of_transformers(power_of_two: bool) -> None:
    """They multiply by 448 / largest where DeepSeek divides by largest / 448: the last bit of a scale, and values that
    are between two, may fall to the other side."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    form = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="ue8m0" if power_of_two else "float")
    weight = draw((256, 384))
    theirs: dict[str, Any] = fp8.Fp8Quantize(SimpleNamespace(quantization_config=form)).convert({"a.weight": weight})
    q, scale = quantize_blocks(weight, 128, 128, power_of_two=power_of_two)
    assert torch.allclose(scale, theirs["a.weight_scale_inv"].float(), rtol=2.0**-22, atol=0)
    differs = q.float() != theirs["a.weight"].float()
    assert differs.sum() <= (0 if power_of_two else 3)
