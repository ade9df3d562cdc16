"""What can be checked before any worker starts. Light to import; Megatron is imported when a check needs it."""

from __future__ import annotations

from slime_rl.config import Config
from slime_rl.trainer.plugins import MODEL_CONVERSION, MODEL_PROVIDER, load_conversion

# Fields of Megatron's optimizer whose code there asks for more than a CPU has, and fails at its start or first update.
NEEDS_GPU = {
    "use_precision_aware_optimizer": "Transformer Engine's optimizer",
    "optimizer_cpu_offload": "a GPU to offload from",
}


def check_trainer(config: Config) -> None:
    """Raise ValueError when the trainer's plugins or pass-through flags do not fit."""
    check_megatron_args(config)
    if config.model.model_provider_path is not None:
        MODEL_PROVIDER.load(config.model.model_provider_path)
    if config.model.model_conversion_path not in MODEL_CONVERSION.builtins:
        load_conversion(config.model.model_conversion_path)


def check_megatron_args(config: Config) -> None:
    """Raise ValueError when a --megatron-* flag is unknown, is ours to set, has a value of the wrong type, or needs a
    GPU where there is none."""
    if not config.model.megatron_args:
        return
    import torch

    from slime_rl.trainer.cpu import proxy

    proxy.install(without_cuda=not torch.cuda.is_available())  # so that a worker may still start in this process
    from slime_rl.trainer.arguments import parse_megatron_args

    given = parse_megatron_args(config.model.megatron_args).optimizer
    cluster = config.cluster
    if cluster.device != "cpu" and (cluster.device == "cuda" or cluster.ray_address or torch.cuda.is_available()):
        return
    for name, needed in NEEDS_GPU.items():
        if given.get(name):
            raise ValueError(f"--megatron-{name.replace('_', '-')} needs {needed}; this run trains on CPU")


def check_architecture(config: Config) -> str:
    """Read config.json as the trainer would, without building anything; the name of the model's type.

    Raises:
        ValueError: an unknown architecture, a field that its family does not know, or a value that it cannot compute.
    """
    import torch

    from slime_rl.trainer.cpu import proxy

    proxy.install(without_cuda=not torch.cuda.is_available())  # some families import Megatron
    from slime_rl.trainer.families import FAMILIES, find_family
    from slime_rl.trainer.families.family import head_dim_of
    from slime_rl.trainer.families.fields import Fields
    from slime_rl.trainer.rope import rotary_frequencies

    fields = Fields(config.model.hf_checkpoint, config.model.trust_remote_code)
    family = find_family(fields.model_type)
    if family is None:
        raise ValueError(
            f"{fields.path}/config.json: model_type {fields.model_type!r} is not one of {', '.join(FAMILIES)}; "
            "--model-conversion-path mbridge knows a few others"
        )
    family.transformer(fields)
    if not family.is_mla:
        rotary_frequencies(fields, head_dim_of(fields))
    family.rules(fields)
    fields.quantization()
    fields.check_all_read()
    return f"{fields.model_type}: every field of config.json is known"
