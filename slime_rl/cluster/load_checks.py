"""Whether the checkpoint of --load can be loaded by this run, as far as its small files tell. Light: no torch."""

from __future__ import annotations

from pathlib import Path

from slime_rl.cluster.checkpoint import find_checkpoint, model_identity
from slime_rl.config import Config


def check_loadable(config: Config) -> Path:
    """The folder of the checkpoint that --load names.

    Raises:
        ValueError: there is none, it is of another model, or it holds weights only and --finetune is not given.
    """
    assert config.checkpoint.load is not None
    folder, meta = find_checkpoint(Path(config.checkpoint.load))
    own = model_identity(config.model.hf_checkpoint)
    if own != (meta.model_type, meta.num_parameters_shape):
        origin = f" ({meta.hf_checkpoint})" if meta.hf_checkpoint else ""
        raise ValueError(
            f"--load {folder} is a checkpoint of a {meta.model_type} model{origin} ({meta.num_parameters_shape}: "
            f"hidden x layers x vocabulary), --hf-checkpoint {config.model.hf_checkpoint} is {own[0]} ({own[1]})"
        )
    if meta.kind == "weights" and not config.checkpoint.finetune:
        raise ValueError(f"--load {folder} holds weights only, no run to continue; add --finetune to start from them")
    return folder
