"""config.json of a checkpoint, read so that nothing in it can be overlooked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from slime_rl.config.quantization import FIELD, Fp8Blocks, read_quantization

# Says nothing about what the model computes for given weights and tokens. How to sample stood in config.json once.
WITHOUT_EFFECT = frozenset(GenerationConfig().to_dict()) | frozenset(
    [
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "initializer_range",
        "max_position_embeddings",
        "attention_dropout",
        "pretraining_tp",
        "_name_or_path",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "_attn_implementation",
        "id2label",
        "label2id",
        "return_dict",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "pruned_heads",
        "prefix",
        "finetuning_task",
        "is_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "is_encoder_decoder",
        "task_specific_params",
        "gradient_checkpointing",
        "unsloth_version",
        "chunk_size_feed_forward",
        "problem_type",
        "_attn_implementation_autoset",
        "model_max_length",
        "tokenizer_class",
        "router_jitter_noise",
        "transformers.js_config",
    ]
)
# Model types without a class of their own in transformers, and the class that reads their config.
SAME_CONFIG_AS = {"kimi_k2": "deepseek_v3"}
_MISSING = object()


class Fields:
    """`fields("hidden_size")` is a value of config.json or its default in transformers; what was asked for is noted."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self.path = path
        self.raw: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
        self.hf = self._load(trust_remote_code)
        self._read: set[str] = set()

    def _load(self, trust_remote_code: bool) -> PretrainedConfig:
        known = SAME_CONFIG_AS.get(self.model_type)
        try:
            if known is not None:
                return AutoConfig.for_model(known, **_without(self.raw, "model_type", "auto_map"))
            return AutoConfig.from_pretrained(self.path, trust_remote_code=trust_remote_code)
        except Exception as error:  # each configuration class checks in its own way
            text = " ".join(str(error).split())
            raise ValueError(
                f"{self.path}/config.json: transformers refuses it: {type(error).__name__}: {text}"
            ) from error

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        """The value of a field.

        Raises:
            ValueError: it is missing, and no default is given.
        """
        aliases = getattr(self.hf, "attribute_map", {})  # transformers may write a field under another name
        meant = aliases.get(name, name)
        self._read |= {name, meant, *(alias for alias, own in aliases.items() if own == meant)}
        value = getattr(self.hf, name, self.raw.get(name, default))
        if value is _MISSING:
            raise ValueError(f"{self.path}/config.json: the field {name!r} of a {self.model_type} model is missing")
        return value

    def must_be(self, name: str, *values: Any, default: Any = None) -> None:
        """Refuse a field whose other values compute something that is not built here.

        Raises:
            ValueError: with the field, what it may be and what it is.
        """
        found = self(name, default)
        if found not in values:
            allowed = " or ".join(repr(value) for value in values)
            raise ValueError(
                f"{self.path}/config.json: {name} of a {self.model_type} model must be {allowed}, got {found!r}; "
                "the model would compute something else than this trainer"
            )

    def quantization(self) -> Fp8Blocks | None:
        """How the weights are stored; see read_quantization. They are dequantised when they are loaded."""
        self._read.add(FIELD)
        return read_quantization(self.path)

    def ignore(self, *names: str) -> None:
        """These have no effect in this family."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Refuse what nobody asked for: it may change what the model computes.

        Raises:
            ValueError: with the field and its value.
        """
        for name, value in self.raw.items():
            if value is not None and name not in self._read and name not in WITHOUT_EFFECT:
                raise ValueError(
                    f"{self.path}/config.json: the field {name!r} = {value!r} is not known for a {self.model_type} "
                    "model here; it may change what the model computes, so it is not ignored"
                )


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
