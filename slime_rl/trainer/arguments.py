"""`--megatron-NAME VALUE`: fields of Megatron's own configs, typed from their dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

FLAG = "--megatron-"
OWN_FLAGS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "sequence_parallel": "--sequence-parallel",
    "params_dtype": "--train-dtype",
    "pipeline_dtype": "--train-dtype",
    "bf16": "--train-dtype",
    "fp16": "--train-dtype",
    "lr": "--lr",
    "min_lr": "--min-lr",
    "weight_decay": "--weight-decay",
    "adam_beta1": "--adam-beta1",
    "adam_beta2": "--adam-beta2",
    "adam_eps": "--adam-eps",
    "clip_grad": "--clip-grad",
}
SET_BY_TRAINER = {
    "calculate_per_token_loss": "the loss is weighted before Megatron sees it",
    "variable_seq_lengths": "micro-batches are packed and differ in length",
    "optimizer": "it is adam, whose state checkpoints hold and reshard",
    "num_layers": "the shape comes from --hf-checkpoint",
    "hidden_size": "the shape comes from --hf-checkpoint",
    "num_attention_heads": "the shape comes from --hf-checkpoint",
}


@dataclass(frozen=True)
class MegatronArgs:
    """What was given, by the config it belongs to; a name that several configs have is in each of them."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


def parse_megatron_args(args: tuple[str, ...]) -> MegatronArgs:
    """Typed fields from ('--name', 'value', …); a name without a value means True.

    Raises:
        ValueError: a flag is unknown, is ours to set, or has a value of the wrong type.
    """
    fields = [
        _fields(TransformerConfig, MLATransformerConfig),
        _fields(OptimizerConfig),
        _fields(DistributedDataParallelConfig),
    ]
    parsed: list[dict[str, Any]] = [{}, {}, {}]
    for name, values in _split(args):
        owners = [i for i, known in enumerate(fields) if name in known]
        _check_name(name, owners, sorted(set().union(*fields)))
        for i in owners:
            parsed[i][name] = _convert(name, fields[i][name], values)
    return MegatronArgs(*parsed)


def _fields(*classes: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for cls in classes:
        known = {field.name for field in dataclasses.fields(cls)}
        hints.update({name: hint for name, hint in typing.get_type_hints(cls).items() if name in known})
    return hints


def _split(args: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    pairs: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            pairs.append((name.replace("-", "_"), [value] if equals else []))
        else:
            pairs[-1][1].append(arg)  # the first one always starts with --
    return pairs


def _check_name(name: str, owners: list[int], known: list[str]) -> None:
    shown = FLAG + name.replace("_", "-")
    if name in OWN_FLAGS:
        raise ValueError(f"{shown} is set by {OWN_FLAGS[name]}; use that")
    if name in SET_BY_TRAINER:
        raise ValueError(f"{shown} cannot be set: {SET_BY_TRAINER[name]}")
    if not owners:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {FLAG}{close[0].replace('_', '-')}?" if close else ""
        raise ValueError(
            f"{shown} is no field of Megatron's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig"
            f"{hint}"
        )


def _convert(name: str, hint: Any, values: list[str]) -> Any:
    shown = f"{FLAG}{name.replace('_', '-')}"
    for option in _options(hint):
        try:
            return _convert_to(option, values)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{shown} takes {_describe(hint)}, got {' '.join(values) or 'nothing'!r}")


def _options(hint: Any) -> list[Any]:
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [option for arg in get_args(hint) for option in _options(arg)]
    return [hint]


def _convert_to(kind: Any, values: list[str]) -> Any:
    """`values` as `kind`; ValueError or KeyError when they are not one."""
    if get_origin(kind) is list or kind is list:
        item = (get_args(kind) or (str,))[0]
        return [_convert_to(item, [part]) for value in values for part in value.split(",")]
    if kind is bool and not values:
        return True
    if len(values) != 1:
        raise ValueError(values)
    value = values[0]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
    if kind is type(None):
        return {"none": None}[value.lower()]
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[value]
    if kind is torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[value]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[value]
    if kind in (int, float, str):
        return kind(value)
    raise ValueError(value)


def _describe(hint: Any) -> str:
    names = [getattr(option, "__name__", str(option)) for option in _options(hint)]
    return " or ".join(dict.fromkeys(names))
