"""Stand-ins for three packages that SGLang imports and whose wheels need CUDA: sgl_kernel, torchvision and triton.

A package that is installed and imports is left alone. Text models with the torch_native attention backend call
nothing of the three: what is called all the same raises NotImplementedError with its name.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from slime_rl.engine.cpu import permissive

# What sglang 0.5.23 imports from sgl_kernel at module level on CPU. All of it serves speculative decoding and KV
# moves. Other names and submodules must stay missing: sglang has its own fallbacks for those.
SGL_KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


class InterpolationMode(enum.Enum):
    """torchvision's enum; sglang reads its members while it imports its configs."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Config:
    """triton.Config: one choice of an autotuned kernel."""

    def __init__(self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **_: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


class Constexpr:
    """triton.language.constexpr: a value known when a kernel is compiled."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def install() -> None:
    """Put a stand-in into this process for each of the three that is missing or does not import."""
    if not usable("sgl_kernel"):
        _install_sgl_kernel()
    if not usable("torchvision"):
        _install_torchvision()
    if not usable("triton"):
        _install_triton()


def usable(package: str) -> bool:
    """Whether `package` imports. A CUDA build on a CPU torch is installed but fails, in one of three ways."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError):
        for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
            del sys.modules[name]  # what a failed import left behind
        return False
    return True


def _install_sgl_kernel() -> None:
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    functions = {name: _missing(f"sgl_kernel.{name}") for name in SGL_KERNEL_NAMES}
    vars(module).update(functions, __version__="0.4.10")
    sys.modules["sgl_kernel"] = module


def _install_torchvision() -> None:
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the answer: it must ask before there is a stand-in
    permissive.install("torchvision", __version__="0.0.0", InterpolationMode=InterpolationMode)
    transforms = importlib.import_module("torchvision.transforms")
    functional = importlib.import_module("torchvision.transforms.functional")
    for module in (transforms, functional):
        vars(module)["InterpolationMode"] = InterpolationMode


def _install_triton() -> None:
    permissive.install("triton", __version__="3.0.0", Config=Config, cdiv=_cdiv, next_power_of_2=_next_power_of_2)
    vars(importlib.import_module("triton.language"))["constexpr"] = Constexpr


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


def _missing(name: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no CPU implementation; it is needed for CUDA-only features of SGLang")

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    return missing
