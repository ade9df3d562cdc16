"""Whether the checkpoint of --load can be loaded by this run, as far as its small files tell. Light: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_rl.cluster.checkpoint import CheckpointMeta, find_checkpoint, model_identity, read_model_config
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
    if meta.model_config is not None:
        _check_same_maths(config, folder, meta, meta.model_config)
    return folder


# Weights of one shape mean something else with another number of heads, also to a run that starts anew from them.
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def _check_same_maths(config: Config, folder: Path, meta: CheckpointMeta, saved: dict[str, Any]) -> None:
    """Weights of the same shapes may still be of another model: its rotary base, its heads, its norms' epsilon.

    Raises:
        ValueError: a field that both have differs and may change what the model computes.
    """
    theirs, ours = _flat(saved), _flat(read_model_config(config.model.hf_checkpoint))
    different = [name for name in theirs if name in ours and theirs[name] != ours[name]]
    if config.checkpoint.finetune:
        different = [name for name in different if name in _HEADS]
    if not different:
        return
    from slime_rl.trainer.families.fields import WITHOUT_EFFECT  # imports transformers

    for name in different:
        if name not in WITHOUT_EFFECT:
            raise ValueError(
                f"--load {folder} is a checkpoint of a model whose {name} is {theirs[name]!r} "
                f"({meta.hf_checkpoint or 'a converted one'}), that of --hf-checkpoint {config.model.hf_checkpoint} is "
                f"{ours[name]!r}; name the model that was trained"
                + (
                    ""
                    if config.checkpoint.finetune or name in _HEADS
                    else ", or take the weights alone with --finetune"
                )
            )


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given, rotary ones under the same names wherever transformers 4 and 5 keep them."""
    places = ("rope_parameters", "rope_scaling")
    rotary = {k: v for place in places if isinstance(raw.get(place), dict) for k, v in raw[place].items()}
    if "type" in rotary:
        rotary["rope_type"] = rotary.pop("type")
    given = {name: value for name, value in raw.items() if name not in places} | rotary
    return {name: value for name, value in given.items() if value is not None}
