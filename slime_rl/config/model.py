from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check, check_model_folder, check_positive
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model: what is trained.

    The shape always comes from the checkpoint's own config.json.
    """

    hf_checkpoint: str
    """Hugging Face folder with config.json, safetensors and tokenizer; gives shape, tokenizer and first weights."""

    ref_load: str | None = None
    """Hugging Face folder of the reference model for KL; --hf-checkpoint when not given."""

    ref_update_interval: int | None = None
    """Steps after which the current policy becomes the reference; never when not given."""

    teacher_load: str | None = None
    """Hugging Face folder of the teacher of --policy-loss distillation, with the shape of --hf-checkpoint."""

    train_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations in training; bfloat16 keeps float32 master weights in the optimizer."""

    model_provider_path: str | None = None
    """Function that builds the Megatron model, as package.module:name."""

    model_conversion_path: str = "families"
    """Class that maps config and weights between Hugging Face and Megatron: families (ours, docs/models.md), mbridge
    (architectures that only it knows), or package.module:name."""

    trust_remote_code: bool = False
    """Run Python files that come with a checkpoint's tokenizer or config."""

    freeze_params: tuple[str, ...] = flag((), aliases=("--freeze-params-name-list",))
    """Regular expressions; policy parameters whose Megatron name, such as decoder.layers.0.mlp.linear_fc1.weight with
    layers counted over the whole model, one of them is found in are not trained."""

    recompute_activations: bool = False
    """Recompute layer activations in the backward pass to save memory (Megatron's full recompute, layer by layer)."""

    megatron_args: tuple[str, ...] = flag((), passthrough="megatron")
    """Every --megatron-NAME VALUE sets the field NAME of Megatron's TransformerConfig, OptimizerConfig or
    DistributedDataParallelConfig."""

    def __post_init__(self) -> None:
        check_model_folder("--hf-checkpoint", self.hf_checkpoint)
        if self.ref_load is not None:
            check_model_folder("--ref-load", self.ref_load)
        check_positive(ref_update_interval=self.ref_update_interval)
        if self.teacher_load is not None:
            check_model_folder("--teacher-load", self.teacher_load)
        for pattern in self.freeze_params:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"--freeze-params must be regular expressions, got {pattern!r}: {error}") from error
        check(
            bool(self.model_conversion_path), "--model-conversion-path", "must not be empty", self.model_conversion_path
        )

    @property
    def reference_path(self) -> str:
        return self.ref_load or self.hf_checkpoint
