"""Weights between a Hugging Face folder and this rank's Megatron modules, for every family of `families/`.

    load:    for each parameter of this rank: its rule ──► slices of the safetensors files ──► the parameter
    export:  parts of the tensor-parallel workers ──► whole Hugging Face tensors ──► the other expert ranks and stages

Each worker reads only its own part of the files. At any time one parameter is in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime_rl.config import Config
from slime_rl.trainer.architecture import DTYPES, open_architecture
from slime_rl.trainer.families import FAMILIES, find_family
from slime_rl.trainer.families.family import Family, Rules
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.rules import Place, Rule, check_shapes
from slime_rl.trainer.hf_folder import HFFolder
from slime_rl.trainer.model import unwrap

# Where Transformer Engine's layer spec keeps what the local one keeps in a module of its own.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}


@dataclass(frozen=True)
class _Owner:
    """Where a parameter lives: pipeline stage, expert-parallel rank, and what one worker's part looks like."""

    stage: int
    expert_rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FamilyConversion:
    """`ModelConversion` for the families of this package; a plugin sets `family` to one of its own."""

    family: ClassVar[Family | None] = None

    def __init__(self, config: Config, hf_path: str) -> None:
        """Read config.json.

        Raises:
            ValueError: an architecture that is not known, or a field of config.json that is not.
        """
        self.fields = Fields(hf_path, config.model.trust_remote_code)
        family = self.family or find_family(self.fields.model_type)
        if family is None:
            raise ValueError(
                f"--hf-checkpoint {hf_path}: architecture {self.fields.model_type!r} is not one of "
                f"{', '.join(sorted(FAMILIES))}; a plugin can add it (--model-conversion-path, docs/models.md)"
            )
        self._family = family
        self.architecture = open_architecture(config, self.fields, family)
        self.rules: Rules = family.rules(self.fields)
        self.dtype = DTYPES[config.model.train_dtype]
        self._plan: dict[Place, _Owner] | None = None

    @torch.no_grad()
    def load_weights(self, models: list[Any], hf_path: str) -> None:
        """Copy the checkpoint into the modules; collective over all ranks.

        Raises:
            ValueError: a weight is missing or has another shape, or the model has no place for one.
        """
        folder = HFFolder(hf_path)
        own = self.parameters(models)
        wanted = {name for place in own for name in place.names(self.rules[place.key])}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, wanted)
        self.check_coverage(set().union(*everywhere), folder)
        for place, parameter in own.items():
            rule, (rank, size) = self.rules[place.key], _tensor_parallel(place)
            names = place.names(rule)
            sources = [folder.source(name) for name in names]
            try:
                check_shapes(rule, names, sources, parameter.shape, size)
            except ValueError as error:
                raise ValueError(f"{hf_path}: {error}") from error
            parameter.copy_(rule.shard(sources, rank, size))

    @torch.no_grad()
    def export_weights(self, models: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on every rank, in the same order everywhere, one at a time; collective."""
        own = self.parameters(models)
        if self._plan is None:
            self._plan = _gather_plan(own)
        done: set[str] = set()
        device = next(iter(own.values())).device
        for place, owner in self._plan.items():
            rule = self.rules[place.key]
            names = place.names(rule)
            if done.issuperset(names):  # tied embeddings live on the first and on the last pipeline stage
                continue
            done.update(names)
            yield from zip(names, _whole_tensors(own.get(place), place, owner, rule, device), strict=True)

    def kept_weights(self, hf_path: str) -> Iterator[tuple[str, Tensor]]:
        """What the folder has beyond the model that is trained: layers for predicting further tokens."""
        return extra_layers(HFFolder(hf_path, self.dtype), self.architecture.config.num_layers)

    def _num_extra_layers(self) -> int:
        """How many layers beyond those that are trained the folder may have."""
        if not self._family.has_extra_layers:
            return 0
        known = self.fields.raw.get("num_nextn_predict_layers", self.fields.raw.get("num_mtp_layers"))
        return 1 if known is None else int(known)

    def parameters(self, models: list[Any]) -> dict[Place, Tensor]:
        """This rank's parameters and persistent buffers by their place in the whole model.

        Raises:
            ValueError: a parameter that the family has no rule for.
        """
        found: dict[Place, Tensor] = {}
        for model in map(unwrap, models):
            for name, value in model.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor) and "_extra_state" not in name:
                    found[self.place_of(name, model)] = value.data
        return found

    def place_of(self, name: str, model: Any) -> Place:
        """The place of a parameter of a GPTModel; ValueError when the family has no rule for it."""
        place = place_of(name, model)
        if place.key not in self.rules:
            raise ValueError(f"{self.fields.model_type}: Megatron's parameter {name} has no rule in this family")
        return place

    def check_coverage(self, wanted: set[str], folder: HFFolder) -> None:
        """Check that everything in the folder is among the weights `wanted`, and that those are numbers to train.

        Raises:
            ValueError: a weight that would be left out, or one of a type that only means something with a scale.
        """
        unused = [name for name in set(folder.names) - wanted if self._must_be_used(name)]
        if unused:
            raise ValueError(
                f"{folder.path}: {len(unused)} weights have no place in the Megatron model of a "
                f"{self.fields.model_type}, such as {sorted(unused)[0]}; it would compute something else"
            )
        for name in sorted(wanted & set(folder.names)):
            dtype = folder.dtype_of(name)
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(
                    f"{folder.path}: {name} is of type {dtype}; quantised weights must be converted first, to bfloat16"
                )
        self._check_tied(folder)

    def _check_tied(self, folder: HFFolder) -> None:
        """A tied model may store its output layer a second time; transformers uses another one where it differs."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.fields("tie_word_embeddings", False) or head not in folder or embedding not in folder:
            return
        if not torch.equal(folder.tensor(head), folder.tensor(embedding)):
            raise ValueError(
                f"{folder.path}: config.json says that {head} is {embedding} (tie_word_embeddings), and they differ; "
                f"remove {head}, or set tie_word_embeddings to false"
            )

    def _must_be_used(self, name: str) -> bool:
        if name == "lm_head.weight":
            return not self.fields("tie_word_embeddings", False)
        num_layers = self.architecture.config.num_layers
        is_kept = _is_extra_layer(name, num_layers) and not _is_extra_layer(name, num_layers + self._num_extra_layers())
        return not is_kept and not name.endswith("inv_freq")


def extra_layers(folder: HFFolder, num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of layers after the last of `num_layers`."""
    for name in folder.names:
        if _is_extra_layer(name, num_layers):
            yield name, folder.tensor(name)


def _is_extra_layer(name: str, num_layers: int) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers


def place_of(name: str, model: Any) -> Place:
    """The place of a parameter of a GPTModel, by its name there in either layer spec."""
    layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return Place(_outside(name), -1, name)
    module = model.decoder.layers[int(layer[1])]
    key = re.sub(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2", layer[2])
    for fused, own in _FUSED_NORMS.items():
        key = key.replace(fused, own)
    expert = re.search(r"local_experts\.(\d+)\.", key)
    number = -1
    if expert is not None:
        count = module.mlp.num_local_experts
        number = int(expert[1]) + count * mpu.get_expert_model_parallel_rank()
        key = key.replace(expert[0], "local_experts.{expert}.")
    return Place(module.layer_number - 1, number, key)


def _outside(name: str) -> int:
    """Order of what is in no layer: the embedding first, the rest last."""
    return -1 if name.startswith("embedding.") else 1_000_000


def _tensor_parallel(place: Place) -> tuple[int, int]:
    """(rank, size) among the workers that share this parameter."""
    if place.expert >= 0:
        found = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    else:
        found = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return cast(tuple[int, int], found)


def _gather_plan(own: dict[Place, Tensor]) -> dict[Place, _Owner]:
    """Every parameter of the whole model, in order, and who has it; the same on every rank."""
    stage, expert_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    mine = {
        place: _Owner(stage, expert_rank if place.expert >= 0 else -1, tuple(value.shape), value.dtype)
        for place, value in own.items()
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    plan: dict[Place, _Owner] = {}
    for part in everywhere:
        for place, owner in part.items():
            if place not in plan or owner.stage < plan[place].stage:
                plan[place] = owner
    return dict(sorted(plan.items()))


def _whole_tensors(part: Tensor | None, place: Place, owner: _Owner, rule: Rule, device: torch.device) -> list[Tensor]:
    """The Hugging Face tensors of a parameter on every rank, from the parts of those that have it."""
    is_expert = place.expert >= 0
    in_stage = mpu.get_pipeline_model_parallel_rank() == owner.stage
    is_owner = in_stage and (not is_expert or mpu.get_expert_model_parallel_rank() == owner.expert_rank)
    _, size = _tensor_parallel(place)
    if is_owner:
        assert part is not None, place
        tensors = rule.merge(_gather_parts(part, is_expert, 1 if rule.is_replicated else size))
    else:
        shape = torch.empty(owner.shape, dtype=owner.dtype, device="meta")
        blank = rule.merge([shape] * (1 if rule.is_replicated else size))
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in blank]
    if is_expert and in_stage:
        tensors = _spread(tensors, mpu.get_expert_model_parallel_group(), owner.expert_rank, is_owner)
    return _spread(tensors, mpu.get_pipeline_model_parallel_group(), owner.stage, in_stage)


def _gather_parts(part: Tensor, is_expert: bool, size: int) -> list[Tensor]:
    if size == 1:
        return [part]
    group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def _spread(tensors: list[Tensor], group: Any, source: int, has_them: bool) -> list[Tensor]:
    """Give the tensors of group rank `source` to the others of the group."""
    if dist.get_world_size(group) == 1:
        return tensors
    if has_them:
        tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensors
