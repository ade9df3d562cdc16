"""Training checkpoints in Megatron's torch_dist format: any parallel layout can load what another has saved.

folder/  *.distcp, common.pt, metadata.json   model, optimizer, schedule, step, extra (written by all ranks)
         random_<rank>.pt                     random state of each rank; used when the layout is the same
"""

from __future__ import annotations

import inspect
import io
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from slime_rl.trainer.checkpoint_writer import InProcessSaveStrategy, naming_a_full_disk
from slime_rl.trainer.model import global_names, unwrap
from slime_rl.trainer.optimizer import make_moments
from slime_rl.trainer.optimizer_state import gathered_directly
from slime_rl.trainer.pending_save import PendingSave, raise_on_all
from slime_rl.trainer.state import TrainState
from slime_rl.trainer.torch_dist import FORMAT_FILE, check_format

# How Megatron lays out a checkpoint.
LAYOUT: dict[str, Any] = {
    # The optimizer's state can be loaded under another tensor, pipeline or data-parallel size.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,  # every layer under a name of its own, so that one can be read alone
}

# Of the optimizer's groups: a resumed run follows its own flags. Rate and weight decay follow by the schedule.
FROM_FLAGS = ("max_lr", "min_lr", "betas", "eps")


def save(state: TrainState, path: Path, step: int, extra: dict[str, Any]) -> None:
    """Write the checkpoint into `path`, which is made when missing. Collective; the folder is complete on return."""
    PendingSave(_plan(state, path, step, extra), in_background=False).finish()


def begin_save(state: TrainState, path: Path, step: int, extra: dict[str, Any]) -> PendingSave:
    """The same with a thread that writes; the weights must not change before `wait_until_copied`. Collective."""
    return PendingSave(_plan(state, path, step, extra), in_background=True)


def _plan(state: TrainState, path: Path, step: int, extra: dict[str, Any]) -> Any:
    """Megatron's request to save: who writes what, and how. What is no tensor is written here."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    make_moments(state.optimizer)
    content = _sharded(state, is_loading=False) | {
        "step": step,
        "extra": extra,
        "expert_split": _expert_split(state),
        "freeze_params": list(state.config.model.freeze_params),
        "scheduler": state.scheduler.state_dict(),
    }
    strategy = FullyParallelSaveStrategyWrapper(InProcessSaveStrategy(), state.layout.dp_cp.group)
    kept = {key: value for key, value in _metadata(state).items() if key != "dp_cp_group"}
    _write_random_state(state, path / f"random_{dist.get_rank()}.pt")
    with naming_a_full_disk(path):
        return dist_checkpointing.save(
            content, str(path), strategy, content_metadata=kept, async_sharded_save=True, **_save_options()
        )


def load(state: TrainState, path: Path) -> dict[str, Any]:
    """Put the checkpoint into the model, optimizer and schedule; `{"step": …, "extra": …}`. Collective.

    Raises:
        ValueError: the folder holds no checkpoint, or it does not fit the model.
    """
    common = _common(path)
    check_expert_split(common.get("expert_split"), _expert_split(state), path)
    _check_frozen(common.get("freeze_params"), state, path)
    content = _load(state, _sharded(state, is_loading=True), path)
    for i, model in enumerate(state.models):
        unwrap(model).load_state_dict(content[_model_key(state, i)], strict=False)  # not strict: no _extra_state here
    from_flags = [{name: group[name] for name in FROM_FLAGS} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(content["optimizer"])
    for group, values in zip(state.optimizer.param_groups, from_flags, strict=True):
        group.update(values)
    state.scheduler.num_steps = 0  # load_state_dict adds the saved count to it
    state.scheduler.load_state_dict(content["scheduler"])
    _restore_random_state(state, path / f"random_{dist.get_rank()}.pt")
    dist.barrier()
    return {"step": content["step"], "extra": content["extra"]}


def load_weights(state: TrainState, path: Path) -> None:
    """Put the weights of a checkpoint into the model, whatever else it holds; the optimizer starts anew. Collective.

    Raises:
        ValueError: the folder holds no checkpoint, or one of another model.
    """
    models = {
        # Without _extra_state, which is of Transformer Engine and not in a converted checkpoint.
        _model_key(state, i): {k: v for k, v in _sharded_model(state, m).items() if not isinstance(v, ShardedObject)}
        for i, m in enumerate(state.models)
    }
    content = _load(state, models, path)
    for i, model in enumerate(state.models):
        unwrap(model).load_state_dict(content[_model_key(state, i)], strict=False)  # not strict: no _extra_state here
    state.optimizer.reload_model_params()
    dist.barrier()


def _load(state: TrainState, wanted: dict[str, Any], path: Path) -> Any:
    _common(path)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), state.layout.dp_cp.group)
    try:
        return dist_checkpointing.load(wanted, str(path), strategy)
    except (dist_checkpointing.core.CheckpointingException, CheckpointException) as error:
        raise ValueError(
            f"--load: the checkpoint in {path} does not fit the model of --hf-checkpoint: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank that failed; torch puts the traceback of every rank into its message."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return str(next((failure for failure, _ in failures.values()), error))[:300]  # some list every tensor


def _expert_split(state: TrainState) -> list[int] | None:
    """Expert-parallel and expert-tensor-parallel size; None for a model without experts."""
    transformer = unwrap(state.models[0]).config
    if not transformer.num_moe_experts:
        return None
    sizes = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_tensor_parallel_world_size()
    return cast(list[int], list(sizes))


def check_expert_split(saved: list[int] | None, now: list[int] | None, path: Path) -> None:
    """The optimizer's state of experts is not stored so that another split of them could read it.

    Raises:
        ValueError: the sizes differ; says both, and what can be done.
    """
    if saved is not None and now is not None and saved != now:
        raise ValueError(
            f"--load {path}: was saved with --expert-model-parallel-size {saved[0]} (expert tensor parallel size "
            f"{saved[1]}), this run has {now[0]} ({now[1]}); the optimizer state of experts cannot be loaded with "
            "other sizes. Use the same, or take the weights alone with --finetune"
        )


def _check_frozen(saved: list[str] | None, state: TrainState, path: Path) -> None:
    """What was frozen has no optimizer state in the checkpoint, so nothing of it may train now. Collective.

    Raises:
        ValueError: it would; names the patterns of both runs.
    """
    if not saved or saved == list(state.config.model.freeze_params):
        return
    trains = [
        name
        for model in state.models
        for name, parameter in global_names(unwrap(model))
        if parameter.requires_grad and any(re.search(pattern, name) for pattern in saved)
    ]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, trains[:1])
    if names := sorted(name for part in found for name in part):
        now = " ".join(state.config.model.freeze_params) or "none"
        raise ValueError(
            f"--load {path}: was saved with --freeze-params {' '.join(saved)}, this run has {now}; {names[0]} would "
            "train, and the checkpoint has no optimizer state of it. Freeze the same, or take the weights alone with "
            "--finetune"
        )


def _common(path: Path) -> dict[str, Any]:
    if not (path / FORMAT_FILE).is_file():
        raise ValueError(f"--load: {path} holds no training checkpoint (no metadata.json of torch_dist)")
    check_format(path)
    return dist_checkpointing.load_common_state_dict(str(path))


def save_reference(state: TrainState, path: Path) -> None:
    """Write the reference's weights, which the run has moved away from --ref-load. Collective."""
    assert state.reference is not None
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(InProcessSaveStrategy(), state.layout.dp_cp.group)
    with state.reference.swapped_into(state.models):
        models = {_model_key(state, i): _sharded_model(state, model) for i, model in enumerate(state.models)}
        with naming_a_full_disk(path):
            request = dist_checkpointing.save(models, str(path), strategy, async_sharded_save=True, **_save_options())
        PendingSave(request, in_background=False).finish()
    dist.barrier()


def load_reference(state: TrainState, path: Path) -> None:
    """Make the weights that `save_reference` wrote the reference. Collective.

    Raises:
        ValueError: the folder holds no checkpoint, or one of another model.
    """
    assert state.reference is not None
    with state.reference.swapped_into(state.models):
        models = {_model_key(state, i): _sharded_model(state, model) for i, model in enumerate(state.models)}
        content = _load(state, models, path)
        for i, model in enumerate(state.models):
            unwrap(model).load_state_dict(content[_model_key(state, i)], strict=False)
        state.reference.refresh(state.models)
    dist.barrier()


def _sharded_model(state: TrainState, model: Any) -> dict[str, Any]:
    return unwrap(model).sharded_state_dict(metadata=_metadata(state))


def _sharded(state: TrainState, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata(state)
    models = {_model_key(state, i): _sharded_model(state, model) for i, model in enumerate(state.models)}
    with nullcontext() if is_loading else gathered_directly(state.optimizer):
        optimizer = state.optimizer.sharded_state_dict(dict(models), is_loading=is_loading, metadata=metadata)
    return {**models, "optimizer": optimizer}


def _model_key(state: TrainState, index: int) -> str:
    return "model" if len(state.models) == 1 else f"model{index}"


def _metadata(state: TrainState) -> dict[str, Any]:
    return LAYOUT | {"dp_cp_group": state.layout.dp_cp.group}


def _save_options() -> dict[str, Any]:
    """0.19 has a second implementation, which needs CUDA; before, there is no such parameter."""
    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def _tracker() -> Any:
    """Megatron's random states by name; model-parallel seeding has made it."""
    return get_cuda_rng_tracker()


def _layout_sizes(state: TrainState) -> tuple[int, ...]:
    layout = state.layout
    return (layout.tp.size, layout.pp.size, layout.cp.size, layout.dp.size)


def _random_state(state: TrainState) -> dict[str, Any]:
    return {
        "layout": _layout_sizes(state),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None,
        "tracker": _tracker().get_states(),
    }


def _write_random_state(state: TrainState, path: Path) -> None:
    """Collective: the disk may be full for one rank, and the others would wait for it.

    Raises:
        OSError: a rank could not write its file.
    """
    error: Exception | None = None
    try:
        written = io.BytesIO()  # torch.save on a full disk is a RuntimeError that does not say so
        torch.save(_random_state(state), written)
        path.write_bytes(written.getbuffer())
    except OSError as problem:
        error = problem
    raise_on_all(error)


# numpy's generator state is an array of these; torch.load looks up nothing beside them and tensors.
_OF_NUMPYS_STATE: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


def _restore_random_state(state: TrainState, path: Path) -> None:
    """Under another layout there is nothing to restore: which rank draws what has changed."""
    if not path.is_file():
        return
    with torch.serialization.safe_globals(_OF_NUMPYS_STATE):
        saved = torch.load(path, weights_only=True)
    if saved["layout"] != _layout_sizes(state):
        return
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and state.device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], state.device)
    _tracker().set_states(saved["tracker"])
