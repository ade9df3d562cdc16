"""Megatron-core without CUDA and without Transformer Engine, by a hook on its imports.

Every module of `megatron.core` and `mbridge` gets, as its global name `torch`, a stand-in whose `cuda` is the CPU.
torch itself stays as it is (but for `Tensor.type` and `Tensor.cuda`), so that nothing else in the process notices, and
there is no cost per operation.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime_rl.trainer.cpu.adam import FusedAdam

PREFIXES = ("megatron.core", "mbridge")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
FACTORIES_LIKE = ("empty_like", "zeros_like", "ones_like")


def install(without_cuda: bool) -> None:
    """Put the hook in place; a second call does nothing.

    Raises:
        RuntimeError: megatron was imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = next((name for name in sys.modules if name.startswith(PREFIXES)), None)
    if early is not None:
        raise RuntimeError(
            f"{early} was imported before the CPU stand-ins were installed; import it through TrainWorker"
        )
    sys.meta_path.insert(0, _Finder(_torch_without_cuda() if without_cuda else None))
    if without_cuda:
        torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


class _Finder:
    """A meta-path finder that patches the modules of PREFIXES after they ran."""

    def __init__(self, fake_torch: types.ModuleType | None) -> None:
        self.fake_torch = fake_torch

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if not name.startswith(PREFIXES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_patch(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _then_patch(self, execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
        def run(module: types.ModuleType) -> None:
            execute(module)
            _patch_missing_te(module)
            if self.fake_torch is not None:
                _patch_missing_cuda(module, self.fake_torch)

        return run


def _patch_missing_te(module: Any) -> None:
    name = module.__name__.removeprefix("megatron.core.")
    if name == "transformer.multi_latent_attention" and not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # 0.16: TELinear is a MagicMock there, and isinstance() with it is a TypeError
    elif name == "transformer.moe.moe_utils" and not module.HAVE_TE:
        module.te_general_gemm = None  # 0.16: the router reads this name, which only the TE import defines
    elif name == "optimizer" and module.USING_PYTORCH_OPTIMIZER:
        module.Adam, module.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    elif name == "optimizer.distrib_optimizer" and not module.HAVE_APEX_OR_TE:
        module.Adam, module.HAVE_APEX_OR_TE, module.USING_APEX_OPTIMIZER = FusedAdam, True, True


def _patch_missing_cuda(module: Any, fake_torch: types.ModuleType) -> None:
    if vars(module).get("torch") is torch:
        module.torch = fake_torch
    name = module.__name__.removeprefix("megatron.core.")
    if name == "jit":
        module.disable_jit_fuser()  # it is torch.compile: about 30 s of C++ for each fused function
    elif name == "tensor_parallel.random":
        module._set_cuda_rng_state = _set_rng_state  # else queued forever by torch.cuda._lazy_call
    elif name == "transformer.moe.moe_utils":
        module.maybe_move_tensor_to_cpu = _splits_to_host  # all-to-all split sizes must not stay tensors


class _StandIn(types.ModuleType):
    """A module with some names replaced; every other name is the real one's."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        vars(self).update(replaced, _real=real, __path__=real.__path__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Inert:
    """Stands for torch.cuda.Stream, Event and nvtx: any method may be called and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *args: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., _Inert]:
        return lambda *args, **kwargs: self


def _torch_without_cuda() -> types.ModuleType:
    def returns(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    rng = {"get_rng_state": lambda *args, **kwargs: torch.get_rng_state(), "set_rng_state": _set_rng_state}
    stream = returns(_Inert())
    cuda = _StandIn(
        torch.cuda,
        is_available=returns(False),  # --device cpu on a machine that has one
        current_device=returns(torch.device("cpu")),
        device_count=returns(1),
        synchronize=returns(None),
        empty_cache=returns(None),
        set_device=returns(None),
        Stream=_Inert,
        Event=_Inert,
        stream=stream,
        current_stream=stream,
        default_stream=stream,
        nvtx=_Inert(),
        manual_seed=torch.manual_seed,
        random=types.SimpleNamespace(**rng),
        **rng,
    )
    uneven = _StandIn(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    on_cpu = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES + FACTORIES_LIKE}
    return _StandIn(torch, cuda=cuda, distributed=uneven, **on_cpu)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` that understands device="cuda" and pin_memory=True as Megatron writes them."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _splits_to_host(splits: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return splits.numpy() if as_numpy and torch.is_tensor(splits) else splits


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor'."""

    def tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return "torch.cuda." + original(tensor).rsplit(".", 1)[1]

    return tensor_type


def _all_gather(outputs: list[torch.Tensor], x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """dist.all_gather for unequal sizes too, which gloo has not."""
    if len({out.shape for out in outputs}) == 1:
        return dist.all_gather(outputs, x, group=group, async_op=async_op)
    for rank, out in enumerate(outputs):
        if rank == group.rank():
            out.copy_(x)
        dist.broadcast(out, group=group, group_src=rank)
    return None


def _reduce_scatter(
    out: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """dist.reduce_scatter for unequal sizes too, which gloo has not."""
    if len({x.shape for x in inputs}) == 1:
        return dist.reduce_scatter(out, inputs, op=op, group=group, async_op=async_op)
    for rank, x in enumerate(inputs):
        summed = x.clone()
        dist.reduce(summed, group=group, group_dst=rank, op=op)
        if rank == group.rank():
            out.copy_(summed)
    return None
