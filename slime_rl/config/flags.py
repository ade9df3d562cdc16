"""Dataclass fields as command-line flags: one field is one flag, the string below the field is its help.

`flag(default, aliases=...)` gives a field other spellings. `Literal` types become choices, `bool` becomes
`--name/--no-name`, `tuple[T, ...]` takes several values. Parsing is strict; a misspelled flag is answered with the
nearest known one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

T = TypeVar("T")


def flag(default: Any = dataclasses.MISSING, *, aliases: tuple[str, ...] = (), passthrough: str = "") -> Any:
    """A dataclass field with other flag spellings (`aliases`), or one that collects every `--<passthrough>-*` flag."""
    return dataclasses.field(default=default, metadata={"aliases": aliases, "passthrough": passthrough})


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a dataclass, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            value = getattr(following.value, "value", None)
            if isinstance(value, str):
                docs[typing.cast(ast.Name, statement.target).id] = " ".join(value.split())
    return docs


class StrictParser(argparse.ArgumentParser):
    """argparse without abbreviations whose errors are ValueErrors that suggest the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    @property
    def flags(self) -> set[str]:
        """Every spelling of every flag, with the --no- forms."""
        return {option for action in self._actions for option in action.option_strings}

    def parse_strictly(self, args: list[str]) -> argparse.Namespace:
        """Parse, or raise ValueError. Unknown flags come first, so that a misspelled required flag is named."""
        for arg in args:
            if arg.startswith("--") and arg.split("=")[0] not in self.flags:
                self._unknown(arg)
        namespace, unknown = self.parse_known_args(args)
        if unknown:
            self._unknown(unknown[0])
        return namespace

    def check_alone(self, words: list[str]) -> None:
        """Check one flag and its values, whatever else is required.

        Raises:
            ValueError: unknown flag, missing or bad value.
        """
        alone = StrictParser(add_help=False, allow_abbrev=False, parents=[self], conflict_handler="resolve")
        for action in alone._actions:
            action.required = False
        alone.parse_strictly(words)

    def _unknown(self, arg: str) -> NoReturn:
        if why := NEEDLESS.get(arg.split("=")[0]):
            raise ValueError(f"unknown flag {arg}; leave it out: {why}")
        close = nearest_flag(arg.split("=")[0], self.flags)
        hint = f"; did you mean {close}?" if close else "; see --help for all flags"
        raise ValueError(f"unknown flag {arg}{hint}" if arg.startswith("-") else f"unexpected argument {arg!r}")


# Words that other programs use for a flag of ours, letters only. No spelling of ours is near them.
SYNONYMS = {
    "learningrate": "--lr",
    "minlearningrate": "--min-lr",
    "batchsize": "--rollout-batch-size",
    "trainbatchsize": "--rollout-batch-size",
    "groupsize": "--n-samples-per-prompt",
    "numgenerations": "--n-samples-per-prompt",
    "rolloutn": "--n-samples-per-prompt",
    "epochs": "--num-steps",
    "maxsteps": "--num-steps",
    "temperature": "--rollout-temperature",
    "topp": "--rollout-top-p",
    "topk": "--rollout-top-k",
    "maxnewtokens": "--max-response-len",
    "maxcompletionlength": "--max-response-len",
    "maxpromptlength": "--max-prompt-len",
    "model": "--hf-checkpoint",
    "modelpath": "--hf-checkpoint",
    "modelnameorpath": "--hf-checkpoint",
    "refmodel": "--ref-load",
    "outputdir": "--run-dir",
    "resume": "--load",
    "resumefromcheckpoint": "--load",
    "savesteps": "--save-interval",
    "savefreq": "--save-interval",
    "evalsteps": "--eval-interval",
    "testfreq": "--eval-interval",
    "beta": "--kl-loss-coef",
    "klcoefficient": "--kl-loss-coef",
    "epsilon": "--eps-clip",
    "epsilonhigh": "--eps-clip-high",
    "cliprange": "--eps-clip",
    "dtype": "--train-dtype",
    "maxgradnorm": "--clip-grad",
    "gradientclipping": "--clip-grad",
    "warmupsteps": "--lr-warmup-updates",
    "gradientcheckpointing": "--recompute-activations",
    "dataset": "--prompt-data",
    "trainfiles": "--prompt-data",
    "valfiles": "--eval-prompt-data",
    "tensorparallelsize": "--tensor-model-parallel-size",
    "pipelineparallelsize": "--pipeline-model-parallel-size",
    "numgpus": "--train-num-workers",
    "actornumgpuspernode": "--train-num-workers",
    "criticnumnodes": "--critic-num-workers",
    "criticnumgpuspernode": "--critic-num-workers",
    "usetis": "--off-policy-correction",
    "usewandb": "--trackers",
    "recomputegranularity": "--recompute-activations",
    "recomputemethod": "--recompute-activations",
    "recomputenumlayers": "--recompute-activations",
}
_SHAPE = "the model's shape is read from the config.json of --hf-checkpoint"
# Flags of slime and Megatron that nothing here takes the place of -> why.
NEEDLESS = {
    "--use-dynamic-batch-size": "micro-batches are always packed by tokens",
    "--balance-data": "samples are always balanced over the workers",
    **dict.fromkeys(("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"), _SHAPE),
    **dict.fromkeys(("--num-query-groups", "--group-query-attention", "--kv-channels", "--vocab-size"), _SHAPE),
    **dict.fromkeys(("--rotary-base", "--normalization", "--norm-epsilon", "--qk-layernorm", "--swiglu"), _SHAPE),
    **dict.fromkeys(("--disable-bias-linear", "--add-qkv-bias", "--untie-embeddings-and-output-weights"), _SHAPE),
    **dict.fromkeys(("--use-rotary-position-embeddings", "--num-experts", "--moe-router-topk"), _SHAPE),
}
_NEAR = 0.8  # lower finds flags that only share their commonest letters


def nearest_flag(name: str, known: Collection[str]) -> str | None:
    """The flag that was most likely meant: another program's word for it, or the same but for a slip; None rather than
    a far guess."""
    word = _letters(name)
    synonyms = [s for s in difflib.get_close_matches(word, SYNONYMS, n=1, cutoff=0.85) if SYNONYMS[s] in known]
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_NEAR)
    if synonyms and (not close or _likeness(word, synonyms[0]) >= _likeness(word, _letters(close[0]))):
        return SYNONYMS[synonyms[0]]
    return close[0] if close else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def add_dataclass(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add one flag per field of a config dataclass, grouped under the first line of its docstring."""
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip("."))
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for item in dataclasses.fields(cls):
        if item.metadata.get("passthrough"):
            continue
        names = [flag_name(item.name), *item.metadata.get("aliases", ())]
        required = item.default is dataclasses.MISSING
        text = docs.get(item.name, "").replace("%", "%%")
        shown = "" if required or item.default in (None, ()) else f" (default: {item.default})"
        group.add_argument(
            *names,
            dest=item.name,
            default=argparse.SUPPRESS,
            required=required,
            help=text + shown,
            **_argument_options(hints[item.name]),
        )


def _argument_options(hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0])}
    if get_origin(hint) is tuple:
        return {"nargs": "+", "type": _value_type(get_args(hint)[0]), "metavar": get_args(hint)[0].__name__.upper()}
    return {"type": _value_type(hint), "metavar": hint.__name__.upper()}


def _value_type(kind: type) -> Any:
    if kind is str:
        return _text
    if kind is not int:
        return kind

    def integer(text: str) -> int:
        return int(text.replace("_", ""))

    integer.__name__ = "int"  # argparse names it in its message
    return integer


def _text(word: str) -> str:
    """A word as it is; an empty one, as a shell variable without a value gives, would mean the default or `.` later."""
    if not word:
        raise argparse.ArgumentTypeError("must not be empty; leave the flag out for its default")
    return word


def split_passthrough(
    argv: list[str], prefixes: list[str], own: set[str]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Take `--<prefix>-name [values…]` flags for wrapped programs out of `argv`; they are checked by their own room.

    A flag in `own` stays, whatever its prefix: --router-policy is ours.
    """
    rest: list[str] = []
    taken: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    current: list[str] = rest
    for arg in argv:
        if arg.startswith("--"):
            ours = arg.split("=")[0] in own
            prefix = None if ours else next((p for p in prefixes if arg.startswith(f"--{p}-")), None)
            current = rest if prefix is None else taken[prefix]
            if prefix is not None:
                arg = "--" + arg.removeprefix(f"--{prefix}-")
        current.append(arg)
    return rest, {prefix: tuple(values) for prefix, values in taken.items()}


def build(cls: type[T], values: dict[str, Any]) -> T:
    """A dataclass from the parsed values that belong to it; tuples for lists, so that the config stays hashable."""
    names = {item.name for item in dataclasses.fields(typing.cast(Any, cls))}
    picked = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
    return cls(**picked)
