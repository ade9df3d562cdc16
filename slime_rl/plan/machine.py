"""Whether a run on this machine alone fits it, as far as that is certain before anything starts."""

from __future__ import annotations

import os

import psutil

from slime_rl.config import Config
from slime_rl.plan.hardware import GIB
from slime_rl.plan.memory import training_memory
from slime_rl.plan.plan import engine_plans, gpus_of, own_engine_gpus
from slime_rl.plan.shape import read_shape

# What a worker or a rank of an engine has to itself after its imports; measured: 150 to 260 MiB. The plan's estimate is
# what to count on, this is what no run is below.
LEAST_PROCESS_BYTES = 128 * 1024**2
STATE = ("weights", "gradients", "optimizer")


def check_processes(config: Config) -> str:
    """Check that memory holds what every process on CPU needs at least; says what that is.

    Raises:
        ValueError: it does not, swap included.
    """
    cluster, shape = config.cluster, read_shape(config.model.hf_checkpoint)
    ranks = own_engine_gpus(config)
    beside = config.num_gpus_beside if config.needs_engines else 0
    state = training_memory(shape, config, 0.0, num_micro_batches=1).parts
    least = cluster.train_num_workers * sum(state[part] for part in (STATE if config.train.num_steps else STATE[:1]))
    if ranks and not cluster.colocate:  # else they take turns
        least += sum(count * one.num_gpus * one.weight_bytes for count, one in engine_plans(shape, config, 0.0))
    count = config.num_train_processes + ranks + beside
    least += count * LEAST_PROCESS_BYTES
    there = float(psutil.virtual_memory().total + psutil.swap_memory().total)
    if least > there:
        raise ValueError(
            f"{config.num_train_processes} train workers (--train-num-workers, --critic-num-workers) and "
            f"{ranks + beside} engine processes (--rollout-num-engines x --rollout-num-gpus-per-engine, "
            f"--sglang-config) need at least {least / GIB:.1f} GiB, this machine has {there / GIB:.1f}; lower them, or "
            "give --ray-address of a larger cluster"
        )
    return f"{count} processes need at least {least / GIB:.1f} of {there / GIB:.1f} GiB"


def check_gpus(config: Config) -> str:
    """Check that there are as many GPUs as the run takes.

    Raises:
        ValueError: there are not.
    """
    import torch

    needed, there = gpus_of(config), torch.cuda.device_count()
    if needed > there and "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):  # torch counts one part of a GPU
        raise ValueError(
            f"the run takes {needed} GPUs (--train-num-workers, --critic-num-workers, --rollout-num-engines x "
            f"--rollout-num-gpus-per-engine, --sglang-config), this machine has {there}; lower them, or give "
            "--ray-address of a larger cluster"
        )
    return f"{needed} of {there} GPUs"
