"""The settings of one evaluation set: the run's, with its own `--eval-override NAME:FLAG=VALUE` put in."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from slime_rl.config.checks import check
from slime_rl.config.flags import flag_name

if TYPE_CHECKING:
    from slime_rl.config.config import Config

# Section of the Config -> its fields that a set may have for itself.
OWN: dict[str, tuple[str, ...]] = {
    "evaluation": (
        "eval_n_samples_per_prompt",
        "eval_temperature",
        "eval_top_p",
        "eval_top_k",
        "eval_max_response_len",
    ),
    "reward": ("rm_type", "reward_function_path"),
    "rollout": ("generate_function_path",),
    "data": ("input_key", "label_key", "metadata_key"),
}
FLAG = "--eval-override"


def for_evaluation(config: Config, name: str) -> Config:
    """The Config that set `name` is evaluated with; `config` itself where nothing is overridden.

    Raises:
        ValueError: an override of the set is malformed, of an unknown flag, or has a bad value; names the entry.
    """
    changes: dict[str, dict[str, Any]] = {}
    for entry in config.evaluation.eval_override:
        of_set, flag, value = _parts(entry)
        if of_set == name:
            section, field = _field_of(entry, flag)
            given = changes.setdefault(section, {})
            check(field not in given, FLAG, f"takes {flag_name(field)} of {name} once", entry)
            given[field] = _value(config, section, field, entry, value)
    reward = changes.get("reward", {})
    if "rm_type" in reward:  # a function of one's own for the run would win over it
        reward.setdefault("reward_function_path", None)
    if not changes:
        return config
    try:
        sections = {s: dataclasses.replace(getattr(config, s), **fields) for s, fields in changes.items()}
        evaluation = dataclasses.replace(sections.get("evaluation", config.evaluation), eval_override=())
        return dataclasses.replace(config, **{**sections, "evaluation": evaluation})
    except ValueError as error:
        raise ValueError(f"{FLAG} of {name}: {error}") from error


def check_override_names(config: Config) -> None:
    """Every override is of a set that there is."""
    names = [name for name, _ in config.evaluation.datasets]
    for entry in config.evaluation.eval_override:
        check(_parts(entry)[0] in names, FLAG, f"must name a set of --eval-prompt-data {names}", entry)


def _parts(entry: str) -> tuple[str, str, str]:
    name, colon, setting = entry.partition(":")
    flag, equals, value = setting.partition("=")
    check(bool(name and colon and flag and equals), FLAG, "takes NAME:FLAG=VALUE", entry)
    return name, flag, value


def _field_of(entry: str, flag: str) -> tuple[str, str]:
    wanted = flag.removeprefix("--").replace("-", "_")
    for section, fields in OWN.items():
        if wanted in fields:
            return section, wanted
    known = ", ".join(flag_name(field) for fields in OWN.values() for field in fields)
    raise ValueError(f"{FLAG} takes one of {known} for a single set, got {entry!r}")


def _value(config: Config, section: str, field: str, entry: str, text: str) -> Any:
    hint = typing.get_type_hints(type(getattr(config, section)))[field]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    kind = kinds[0]
    if get_origin(hint) is Literal:
        check(text in get_args(hint), FLAG, f"takes one of {', '.join(get_args(hint))} there", entry)
        return text
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{FLAG} takes {kind.__name__} for {flag_name(field)}, got {entry!r}") from None
