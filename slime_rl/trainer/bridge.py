"""`--model-conversion-path mbridge`: architectures that only mbridge knows, with the corrections it needs.

    config.json ──► open_bridge ──► TransformerConfig, layer spec, GPTModel arguments   (for trainer/model.py)
    safetensors ──► MbridgeConversion.load_weights ──► Megatron modules ──► export_weights ──► (HF name, full tensor)

Where Transformer Engine is missing the local layer spec is used; its parameter names are shown to mbridge as the ones
of the Transformer Engine spec, which is what its tables map.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from mbridge import AutoBridge  # noqa: F401  (fills the registry)
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor
from transformers import AutoConfig

from slime_rl.config import Config
from slime_rl.config.quantization import FIELD, read_quantization
from slime_rl.trainer.architecture import DTYPES, Architecture, run_arguments
from slime_rl.trainer.conversion import extra_layers
from slime_rl.trainer.cpu.attention import use_local_modules
from slime_rl.trainer.device import resolve_device
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.hf_folder import HFFolder
from slime_rl.trainer.rope import rope_parameters


def open_bridge(config: Config, hf_path: str) -> Any:
    """The mbridge object of a checkpoint's architecture, its `.config` being the TransformerConfig to build.

    Raises:
        ValueError: an architecture or a kind of RoPE that is not supported.
    """
    hf_config = AutoConfig.from_pretrained(hf_path, trust_remote_code=config.model.trust_remote_code)
    base = _MODEL_REGISTRY.get(hf_config.model_type)
    if base is None:
        known = ", ".join(sorted(_MODEL_REGISTRY))
        raise ValueError(f"--hf-checkpoint {hf_path}: architecture {hf_config.model_type!r} is not one of {known}")
    if read_quantization(hf_path) is not None:
        raise ValueError(f"{hf_path}/config.json: {FIELD}: --model-conversion-path mbridge reads no fp8 weights")
    rope = _rope_arguments(Fields(hf_path, config.model.trust_remote_code))
    hf_config.rope_theta = rope["rotary_base"]  # transformers 5 keeps it in rope_parameters; mbridge reads it here
    has_te = resolve_device(config.cluster.device).has_transformer_engine
    bridge = _corrected(base, hf_config, rope, has_te)(
        hf_config,
        dtype=DTYPES[config.model.train_dtype],
        make_vocab_size_divisible_by=config.parallel.tensor_model_parallel_size,
    )
    arguments = run_arguments(config, has_te)
    if getattr(hf_config, "n_group", None):  # DeepSeek's group-limited routing, which mbridge leaves out
        arguments |= {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}
    bridge.set_extra_args(**arguments)
    bridge.vocab_size = hf_config.vocab_size
    tp = config.parallel.tensor_model_parallel_size
    bridge.padded_vocab_size = -(-hf_config.vocab_size // tp) * tp
    return bridge


def _rope_arguments(fields: Fields) -> dict[str, Any]:
    """`rotary_base` and scaling for GPTModel; what mbridge's models were written for."""
    found = rope_parameters(fields)
    if found["rope_type"] not in ("default", "linear"):
        raise ValueError(
            f"{fields.path}/config.json: --model-conversion-path mbridge has no rope_type {found['rope_type']!r}"
        )
    arguments: dict[str, Any] = {"rotary_base": found["rope_theta"]}
    if found["partial_rotary_factor"] != 1.0:
        arguments["rotary_percent"] = found["partial_rotary_factor"]
    if found["rope_type"] == "linear":
        arguments["seq_len_interpolation_factor"] = found["factor"]
    return arguments


def _corrected(base: Any, hf_config: Any, rope: dict[str, Any], has_te: bool) -> Any:
    """A subclass of mbridge's class for this architecture.

    Its mapping tables are copies: a bridge with tied embeddings changes them in place, and sibling classes share them.
    """
    tables = {name: dict(getattr(base, name)) for name in dir(base) if name.endswith("_MAPPING")}

    def layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        accepts_stage = "vp_stage" in inspect.signature(get_gpt_decoder_block_spec).parameters
        self.has_vp_stage = accepts_stage
        stage: dict[str, Any] = {"vp_stage": vp_stage} if accepts_stage else {}
        spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=has_te, normalization="RMSNorm", **stage)
        return spec if has_te else use_local_modules(spec)

    def gpt_arguments(self: Any) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **rope,
        }

    changes: dict[str, Any] = {
        "_get_transformer_layer_spec": layer_spec,
        "_get_gptmodel_args": gpt_arguments,
        "_get_safetensor_io": lambda self, path: SafeTensorIO(path),
    }
    if hf_config.model_type == "deepseek_v3":
        changes["TransformerConfigClass"] = staticmethod(_mla_config)
    return type(f"Corrected{base.__name__}", (base,), {**tables, **changes})


def _mla_config(**arguments: Any) -> MLATransformerConfig:
    """Megatron renamed a field after mbridge was written, and takes no multi-token-prediction depth of 0."""
    arguments["mtp_num_layers"] = None  # no head for it is trained; the engines do not use one either
    arguments["original_max_position_embeddings"] = arguments.pop("max_position_embeddings")
    return MLATransformerConfig(**arguments)


class MbridgeConversion:
    """Weights between Hugging Face names and this rank's Megatron modules (`ModelConversion`)."""

    def __init__(self, config: Config, hf_path: str) -> None:
        self.bridge = bridge = open_bridge(config, hf_path)

        def build(first: bool, last: bool, vp_stage: int | None) -> Any:
            optional: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
            return GPTModel(
                config=bridge.config,
                transformer_layer_spec=bridge._get_transformer_layer_spec(vp_stage),
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=bool(getattr(bridge.hf_config, "tie_word_embeddings", False)),
                **bridge._get_gptmodel_args() | {"vocab_size": bridge.padded_vocab_size},
                **optional,
            )

        self.architecture = Architecture(bridge.config, bridge.vocab_size, bridge.padded_vocab_size, build)
        self.is_mla = bool(getattr(self.bridge.config, "multi_latent_attention", False))
        self.is_local_spec = not resolve_device(config.cluster.device).has_transformer_engine

    @torch.no_grad()
    def load_weights(self, models: list[Any], hf_path: str) -> None:
        """Copy the checkpoint into the modules; collective over all ranks.

        Raises:
            ValueError: the folder holds a weight that the model has no place for.
        """
        views = self._views(models)
        self._check_coverage(views, hf_path)
        self.bridge.load_weights(views, hf_path)

    @torch.no_grad()
    def export_weights(self, models: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on every rank, in the same order everywhere, one at a time; collective."""
        seen: set[str] = set()
        for name, tensor in self.bridge.export_weights(self._views(models)):
            if name not in seen:  # tied embeddings live on the first and on the last pipeline stage
                seen.add(name)
                yield name, tensor.detach()

    def kept_weights(self, hf_path: str) -> Iterator[tuple[str, Tensor]]:
        """What the folder has beyond the model that is trained: layers for predicting further tokens."""
        return extra_layers(HFFolder(hf_path), self.architecture.config.num_layers)

    def _views(self, models: list[Any]) -> list[_NamesAsInTE]:
        return [_NamesAsInTE(model, self.is_mla, self.is_local_spec) for model in models]

    def _check_coverage(self, views: list[_NamesAsInTE], hf_path: str) -> None:
        wanted: set[str] = set()
        for view in views:
            for name in self.bridge._weight_name_mapping_mcore_local_to_global(view).values():
                wanted.update(self.bridge._weight_name_mapping_mcore_to_hf(name))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, wanted)
        present = set(SafeTensorIO(hf_path).load_hf_weight_names())
        unused = [n for n in present - set().union(*everywhere) if _must_be_used(n, self.bridge.hf_config)]
        if unused:
            raise ValueError(
                f"{hf_path}: {len(unused)} weights have no place in the Megatron model of a "
                f"{self.bridge.hf_config.model_type}, such as {sorted(unused)[0]}; it would compute something else"
            )


def _must_be_used(name: str, hf_config: Any) -> bool:
    if name == "lm_head.weight":
        return not getattr(hf_config, "tie_word_embeddings", False)
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_next_token_head = layer is not None and int(layer[1]) >= hf_config.num_hidden_layers  # DeepSeek's MTP layer
    return not is_next_token_head and not name.endswith("rotary_emb.inv_freq")


class _NamesAsInTE:
    """What mbridge sees in place of a model: the same parameters under the names of the Transformer Engine spec."""

    def __init__(self, model: Any, is_mla: bool, is_local_spec: bool) -> None:
        while hasattr(model, "module"):
            model = model.module
        self.model, self.is_mla, self.is_local_spec = model, is_mla, is_local_spec
        if hasattr(model, "decoder"):
            self.decoder = model.decoder

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._renamed(self.model.state_dict().items()))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._renamed(self.model.named_parameters())

    def _renamed(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in items:
            yield te_name(name, self._is_moe, self.is_mla) if self.is_local_spec else name, value

    def _is_moe(self, layer: int) -> bool:
        return hasattr(self.model.decoder.layers[layer].mlp, "router")


def te_name(name: str, is_moe: Callable[[int], bool], is_mla: bool) -> str:
    """Parameter name of the local layer spec -> that of the Transformer Engine spec, which fuses norms into linears."""
    name = re.sub(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"mlp.experts.\2.weight\1", name)
    if is_mla:
        name = name.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_")
        name = name.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
    else:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    layer = re.search(r"layers\.(\d+)\.pre_mlp_layernorm\.", name)
    if layer is not None and not is_moe(int(layer[1])):
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return name
