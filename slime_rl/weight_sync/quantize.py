"""Weights for engines that hold them as fp8: each is quantised when its turn in the stream comes.

(name, tensor) … ──quantized──► (name, float8_e4m3fn), (name_scale_inv, float32) …    the others as they are
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import Tensor

from slime_rl.config.quantization import SCALE, Fp8Blocks, quantized_weights, read_quantization
from slime_rl.data.fp8 import quantize_blocks


class EngineForm:
    """The form in which engines with the weights of a folder hold them. The folder is read once."""

    def __init__(self, hf_path: str) -> None:
        """Raises ValueError when config.json and the files say different things, or a form that is not known."""
        self.blocks = read_quantization(hf_path)
        self.names = frozenset(quantized_weights(hf_path))

    def of(self, named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The same weights in that form; plain ones are given back as they are."""
        return named if self.blocks is None else quantized(named, self.blocks, self.names)


def quantized(
    named: Iterable[tuple[str, Tensor]], blocks: Fp8Blocks, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Those in `names` as fp8, each followed by its scales. Holds one tensor at a time.

    Raises:
        ValueError: a weight has a value that is not finite.
    """
    for name, tensor in named:
        if name not in names:
            yield name, tensor
            continue
        try:
            q, scale = quantize_blocks(tensor.detach(), blocks.rows, blocks.columns, power_of_two=blocks.power_of_two)
        except ValueError as error:
            raise ValueError(f"weight {name}: {error}") from error
        yield name, q
        yield name + SCALE, scale
