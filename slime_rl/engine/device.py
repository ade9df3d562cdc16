"""Which device the engines of this machine compute on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

# No such file, no driver, no CUDA device: saves an engine's owner from importing torch just to learn that.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-ctrl")


def engine_device(requested: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device for `--device`.

    Raises:
        ValueError: cuda was asked for and there is none.
    """
    if requested == "cpu":
        return "cpu"
    if _has_cuda():
        return "cuda"
    if requested == "cuda":
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return "cpu"


def _has_cuda() -> bool:
    if not any(Path(name).exists() for name in DRIVER_FILES):
        return False
    import torch

    return torch.cuda.is_available()
