"""The reference policy: a second set of weights, kept in host memory and swapped into the model for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from slime_rl.trainer.model import unwrap


def _weights(models: list[Any]) -> Iterator[Tensor]:
    """Every parameter and persistent buffer (a router's expert bias is one), in a fixed order."""
    for model in models:
        for value in unwrap(model).state_dict(keep_vars=True).values():
            if isinstance(value, Tensor):
                yield value


class ReferenceWeights:
    """A copy of this rank's weights at one moment."""

    def __init__(self, models: list[Any]) -> None:
        self._copies: list[Tensor] = []
        self.refresh(models)

    def refresh(self, models: list[Any]) -> None:
        """Make the current weights the reference."""
        self._copies = [weight.detach().to("cpu", copy=True) for weight in _weights(models)]

    @contextmanager
    def swapped_into(self, models: list[Any]) -> Iterator[None]:
        """Within the block the model computes with the reference; the policy's own storage is not touched.

        On a GPU this takes the memory of one more set of this rank's weights.
        """
        weights = list(_weights(models))
        own = [weight.data for weight in weights]
        try:
            for weight, copy in zip(weights, self._copies, strict=True):
                weight.data = copy.to(weight.device, non_blocking=True)
            yield
        finally:
            for weight, data in zip(weights, own, strict=True):
                weight.data = data
