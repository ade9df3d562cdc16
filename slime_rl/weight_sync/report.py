"""What one weight update did; light, because the driver reads it and does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one weight update moved."""

    version: int
    num_tensors: int
    num_bytes: int  # sent to each engine
    seconds: float  # with the engines' pause, from the first request to the last answer
    updated: list[str]  # URLs of the engines that serve this version now
    failed: dict[str, str]  # URL -> what went wrong; such an engine is paused or gone and must be replaced
    changed_share: float  # share of the values that were sent; less than 1 where only changed ones are
