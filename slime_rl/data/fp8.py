"""Weights as 8-bit floats with a scale for each block: float8_e4m3fn, the form of DeepSeek-V3 and of Qwen3's "-FP8".

    scale_inv[a, b] = max |w| of block (a, b) / 448          448 is the largest e4m3 value
    q[r, c]         = e4m3(w[r, c] / scale_inv)              rounded to nearest, ties to even
    w'[r, c]        = q[r, c] * scale_inv[r // rows, c // columns]

e4m3 has 3 bits of mantissa and is denormal below 2^-6: |w' - w| <= max(|w| / 16, scale_inv / 1024), but for float32's
rounding. What lies on the grid comes back as it was: quantising w' gives q again. The last blocks of a matrix may be
smaller. With `power_of_two` scales are rounded up to powers of two (`scale_fmt: ue8m0`).
Source: DeepSeek-V3, arXiv:2412.19437, 3.3.2, and `act_quant` of its inference code.

Shape letters: O, I rows and columns of a weight; A = ceil(O / rows), B = ceil(I / columns) blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it would be denormal, and dividing by it could overflow
_STRIP = 1 << 20  # values that are in float32 at once; more would leave a CPU's cache and be twice as slow


def quantize_blocks(weight: Tensor, rows: int, columns: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(q `[O, I]` float8_e4m3fn, scale_inv `[A, B]` float32) of `weight [O, I]`, on its device. A block of zeros has
    scale 1.

    Raises:
        ValueError: a value is not finite; e4m3 has no infinity, and one NaN would make its whole block NaN.
    """
    o, i = weight.shape
    q = torch.empty(o, i, dtype=E4M3, device=weight.device)
    scale = torch.empty(-(-o // rows), -(-i // columns), dtype=torch.float32, device=weight.device)
    step = _blocks_at_once(weight, rows)
    for block in range(0, scale.size(0), step):
        strip, into = weight[block * rows : (block + step) * rows], slice(block * rows, (block + step) * rows)
        q[into], scale[block : block + step] = _quantize_strip(strip, rows, columns, power_of_two)
    if not bool(scale.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise ValueError(f"values must be finite to be stored as fp8, {count} of {weight.numel()} are not")
    return q, scale


def _blocks_at_once(weight: Tensor, rows: int) -> int:
    """How many rows of blocks make a strip."""
    return max(1, (_STRIP if weight.device.type == "cpu" else weight.numel()) // (rows * weight.size(1)))


def _quantize_strip(weight: Tensor, rows: int, columns: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    o, i = weight.shape
    a, b = -(-o // rows), -(-i // columns)
    if (o, i) == (a * rows, b * columns):
        padded = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    else:
        padded = torch.zeros(a * rows, b * columns, dtype=torch.float32, device=weight.device)
        padded[:o, :i] = weight
    blocks = padded.view(a, rows, b, columns)
    largest = blocks.abs().amax(dim=(1, 3))  # NaN where one is
    scale = (largest / E4M3_MAX).clamp(min=_SMALLEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = scale.where(largest.isfinite(), largest)
    scale = scale.masked_fill(largest == 0, 1.0)
    blocks /= scale[:, None, :, None]
    return padded.clamp_(-E4M3_MAX, E4M3_MAX)[:o, :i].to(E4M3), scale


def dequantize_blocks(
    q: Tensor, scale_inv: Tensor, rows: int, columns: int, *, at: tuple[int, int] = (0, 0), dtype: torch.dtype
) -> Tensor:
    """`q [o, i]` times its scales, in float32 and then as `dtype`. `q` is the part of a weight that begins at row and
    column `at`; `scale_inv [A, B]` is that of the whole weight."""
    down = (torch.arange(q.size(0), device=q.device) + at[0]) // rows
    across = (torch.arange(q.size(1), device=q.device) + at[1]) // columns
    scales = scale_inv.to(torch.float32)[:, across]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    step = _blocks_at_once(q, 1)
    for top in range(0, q.size(0), step):
        torch.mul(q[top : top + step].to(torch.float32), scales[down[top : top + step]], out=out[top : top + step])
    return out
