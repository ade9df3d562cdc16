"""`--sglang-config FILE`: engines with arguments of their own, and models beside the policy. The file has slime's keys.

sglang:
  - name: policy                       # gets the trainer's weights; without model_path it is --hf-checkpoint
    server_groups:
      - {num_gpus: 2, overrides: {max-running-requests: 64}}
      - {num_gpus: 4, num_gpus_per_engine: 4, overrides: {chunked-prefill-size: 512}}
  - name: judge
    model_path: /models/judge          # keeps its weights
    server_groups:
      - {num_gpus: 2, num_gpus_per_engine: 2}
      # worker_type: prefill and worker_type: decode in groups of one model: prompts and responses on different engines
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from slime_rl.config.checks import check_file, check_model_folder
from slime_rl.config.yaml_file import read_yaml

FLAG = "--sglang-config"
POLICY = "policy"
SCHEME = "sglang:"  # --reward-url sglang:NAME
_LONGEST_NAME = 200  # a file's is 255
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
MODE_ARGUMENT = "--disaggregation-mode"
TRANSFER_ARGUMENT = "--disaggregation-transfer-backend"
# What engines that hand over KV caches must agree on: the form of a cache, and the way it goes.
_SAME_IN_BOTH = ("--dtype", "--kv-cache-dtype", "--page-size", TRANSFER_ARGUMENT)
WorkerType = Literal["regular", "prefill", "decode"]


@dataclass(frozen=True)
class ServerGroup:
    """Engines of one model that are started alike. On CPU a GPU is the place of one process."""

    num_engines: int
    num_gpus_per_engine: int
    arguments: tuple[str, ...] = ()  # for SGLang, after those of the run
    worker_type: WorkerType = "regular"

    @property
    def num_gpus(self) -> int:
        return self.num_engines * self.num_gpus_per_engine

    @property
    def all_arguments(self) -> tuple[str, ...]:
        """With the one that `worker_type` stands for."""
        mode = () if self.worker_type == "regular" else (f"{MODE_ARGUMENT}={self.worker_type}",)
        return (*mode, *self.arguments)


@dataclass(frozen=True)
class ServedModel:
    """A model that engines serve; `model_path` None is --hf-checkpoint."""

    name: str
    model_path: str | None
    is_policy: bool
    groups: tuple[ServerGroup, ...]

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.groups)

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of an engine, of each kind once, in the order of the groups."""
        return tuple(dict.fromkeys(group.num_gpus_per_engine for group in self.groups))

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts and responses are computed by different engines."""
        return any(group.worker_type != "regular" for group in self.groups)


def worker_type_of(sglang_args: Sequence[str]) -> WorkerType:
    """What an engine with these arguments is."""
    mode = value_of(MODE_ARGUMENT, sglang_args)
    return mode if mode in ("prefill", "decode") else "regular"


def read_served_models(path: str, gpus_per_engine: int) -> tuple[ServedModel, ...]:
    """The models of a file, the policy first. `gpus_per_engine` is for groups that do not say it themselves.

    Raises:
        ValueError: no such file, not YAML, or not of the form above; names the file and the place in it.
    """
    check_file(FLAG, path)
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{FLAG} {path}: {error}") from error
    entries = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or len(content) != 1:
        _fail(path, "must hold one key, sglang, with a list of models", content)
    models = [_model(f"{path}: model {number}", entry, gpus_per_engine) for number, entry in enumerate(entries)]
    names = [model.name for model in models]
    if len(set(names)) != len(names):
        _fail(path, "must give every model a name of its own", names)
    policies = [model for model in models if model.is_policy]
    if len(policies) != 1:
        _fail(path, "must have exactly one model with update_weights (without model_path it is so by itself)", names)
    if policies[0].is_disaggregated and len(policies[0].sizes) > 1:
        rule = f"must give all engines of {policies[0].name} the same num_gpus_per_engine, since caches go between them"
        _fail(path, rule, policies[0].sizes)
    return (*policies, *(model for model in models if not model.is_policy))


def _model(where: str, entry: Any, gpus_per_engine: int) -> ServedModel:
    _check_keys(where, entry, _MODEL_KEYS)
    name, path = entry.get("name"), entry.get("model_path")
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        _fail(where, "must have a name of letters, digits, - and _", name)
    if len(name.encode()) > _LONGEST_NAME:
        _fail(
            where, f"must have a name of at most {_LONGEST_NAME} bytes, since its router's log is named after it", name
        )
    if path is not None:
        check_model_folder(f"{FLAG} {where}: model_path", str(path))
    updated = entry.get("update_weights", path is None)
    if not isinstance(updated, bool):
        _fail(where, "update_weights must be true or false", updated)
    groups = entry.get("server_groups")
    if not isinstance(groups, list) or not groups:
        _fail(where, "server_groups must be a list", groups)
    each = entry.get("num_gpus_per_engine", gpus_per_engine if updated else 1)
    _check_count(where, "num_gpus_per_engine", each)
    parts = tuple(_group(f"{where}, group {number}", group, each) for number, group in enumerate(groups))
    types = {part.worker_type for part in parts}
    if types not in ({"regular"}, {"prefill", "decode"}):
        _fail(where, "worker_type must be prefill and decode in its groups, both of them, or regular in all", types)
    model = ServedModel(name, None if path is None else str(path), updated, parts)
    if model.is_disaggregated:
        _check_alike(where, parts, _SAME_IN_BOTH, "caches go from prefill to decode engines")
    if updated:
        _check_alike(where, parts, ("--dtype",), "engines are compared by the checksum of their weights")
    return model


def _check_alike(where: str, parts: Sequence[ServerGroup], names: Sequence[str], reason: str) -> None:
    for name in names:
        found = [value_of(name, part.arguments) for part in parts]
        if len(set(found)) > 1:
            rule = f"overrides must give all groups the same {name.removeprefix('--')}, since {reason}"
            _fail(where, rule, found)


def value_of(name: str, arguments: Sequence[str]) -> str | None:
    """What `--name=value` or `--name value` among arguments of SGLang's gives; the last one wins, as there."""
    found = None
    for word, following in zip(arguments, [*arguments[1:], None], strict=False):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _group(where: str, entry: Any, gpus_per_engine: int) -> ServerGroup:
    _check_keys(where, entry, _GROUP_KEYS)
    worker_type = entry.get("worker_type", "regular")
    if worker_type not in get_args(WorkerType):
        _fail(where, f"worker_type must be one of {', '.join(get_args(WorkerType))}", worker_type)
    each, num_gpus = entry.get("num_gpus_per_engine", gpus_per_engine), entry.get("num_gpus")
    _check_count(where, "num_gpus_per_engine", each)
    _check_count(where, "num_gpus", num_gpus)
    if num_gpus % each:
        _fail(where, f"num_gpus must be a multiple of num_gpus_per_engine ({each})", num_gpus)
    overrides = entry.get("overrides", {})
    if not isinstance(overrides, dict):
        _fail(where, "overrides must be a mapping of SGLang's arguments to values", overrides)
    for key, value in overrides.items():
        if value is None or value == [] or value == "":
            _fail(where, f"overrides must give {key} a value, or leave it out", value)
    words = tuple(word for key, value in overrides.items() for word in _words(key, value))
    return ServerGroup(num_gpus // each, each, words, worker_type)


def _words(key: Any, value: Any) -> list[str]:
    """One argument of SGLang's as words of a command line."""
    name = "--" + str(key).removeprefix("--").replace("_", "-")
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [f"{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def _check_count(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(where, f"{name} must be a whole number > 0", value)


def _check_keys(where: str, entry: Any, known: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        _fail(where, f"must be a mapping with {', '.join(known)}", entry)
    unknown = [key for key in entry if key not in known]
    if unknown:
        _fail(where, f"may have the keys {', '.join(known)}", unknown[0])


def _fail(where: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{FLAG} {where} {rule}, got {value!r}")
