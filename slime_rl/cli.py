"""The `slime-rl` command: one name for everything.

slime-rl train …      slime-rl plan …        slime-rl dashboard RUN
slime-rl convert …    slime-rl doctor        slime-rl inspect …
eval "$(slime-rl completion bash)"           tab completion of commands and flags
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from slime_rl.config import make_parser
from slime_rl.config.flags import nearest_flag

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@dataclass(frozen=True)
class Command:
    """`target` is a module with `main(argv) -> int`, or a file in tools/ of a source checkout."""

    target: str
    about: str
    flags: str = ""  # for tab completion; a test compares them with --help. Those of a run come on top for train, plan


_MODEL_PLUGINS = "--model-conversion-path --model-provider-path"
_WORKERS = f"{_MODEL_PLUGINS} --num-workers --trust-remote-code"
CONVERSIONS: dict[str, Command] = {
    "gguf-to-hf": Command("tools/convert_gguf_to_hf.py", "a GGUF file to a Hugging Face folder", "--dtype --package"),
    "hf-to-torch-dist": Command(
        "tools/convert_hf_to_torch_dist.py",
        "a Hugging Face folder to a checkpoint",
        f"--hf-checkpoint --save {_WORKERS}",
    ),
    "torch-dist-to-hf": Command(
        "tools/convert_torch_dist_to_hf.py",
        "a checkpoint to a Hugging Face folder",
        f"--dtype --force --input-dir --origin-hf-dir --output-dir --shard-size-gb {_WORKERS}",
    ),
    "compare": Command(
        "tools/compare_checkpoints.py",
        "the weights of two checkpoints",
        f"--origin-hf-dir --tolerance {_MODEL_PLUGINS}",
    ),
}
COMMANDS: dict[str, Command] = {
    "train": Command("slime_rl.train", "train a model by reinforcement learning or on labels"),
    "plan": Command(
        "slime_rl.plan.__main__",
        "does it fit, and how long will a step take",
        "--gpu --gpus-per-node --json --mean-prompt-len --mean-response-len --num-gpus --rates --shape",
    ),
    "dashboard": Command("slime_rl.dashboard.__main__", "look at runs in a browser, live or finished", "--host --port"),
    "doctor": Command(
        "slime_rl.doctor", "what this machine has for a run, and what to do about the rest", "--json --no-ray"
    ),
    "convert": Command("", "weights between formats: slime-rl convert KIND, KIND one of " + ", ".join(CONVERSIONS)),
    "inspect": Command(
        "tools/inspect_buffer.py", "what is in the data buffer of a checkpoint", "--group --groups --watch"
    ),
    "replay": Command("tools/replay_step.py", "run a dumped training step again and compare its numbers"),
}
SHELLS = ("bash",)
COMPLETION_HELP = """usage: slime-rl completion [bash]; prints a function that completes commands, flags and files

  eval "$(slime-rl completion bash)"           in ~/.bashrc to keep it"""

BASH = """_slime_rl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    case $COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}}:$word in
    1:*) COMPREPLY=($(compgen -W "{commands}" -- "$word")) ;;
    2:convert:*) COMPREPLY=($(compgen -W "{conversions}" -- "$word")) ;;
    2:completion:*) COMPREPLY=($(compgen -W "{shells}" -- "$word")) ;;
{flags}
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _slime_rl slime-rl
"""


def completion() -> str:
    """A bash function that completes commands, their flags, and files."""
    flags = {f"*:{name}:*": command.flags for name, command in COMMANDS.items()}
    flags |= {f"*:convert:{name}": command.flags for name, command in CONVERSIONS.items()}
    of_runs = " ".join(sorted(make_parser().flags))
    for name in ("train", "plan"):
        flags[f"*:{name}:*"] = f"{flags[f'*:{name}:*']} {of_runs}".strip()
    cases = [f'    {at}:--*) COMPREPLY=($(compgen -W "{words}" -- "$word")) ;;' for at, words in flags.items() if words]
    return BASH.format(
        commands=" ".join([*COMMANDS, "completion"]),
        conversions=" ".join(CONVERSIONS),
        shells=" ".join(SHELLS),
        flags="\n".join(cases),
    )


def help_text(program: str, commands: dict[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {program} COMMAND [flags]; {program} COMMAND --help tells them", ""]
    lines += [f"  {name:<{width}}  {command.about}" for name, command in commands.items()]
    return "\n".join([*lines, "", 'tab completion: eval "$(slime-rl completion bash)"'])


def load(command: Command) -> Callable[[list[str]], int]:
    """Its `main`.

    Raises:
        ValueError: a tool, and this is not a source checkout.
    """
    if not command.target.startswith("tools/"):
        return importlib.import_module(command.target).main
    path = TOOLS / command.target.removeprefix("tools/")
    if not path.is_file():
        raise ValueError(f"{command.target} belongs to a source checkout; there is none around {Path(__file__).parent}")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))  # for good: processes that a tool starts import it by its name, too
    return importlib.import_module(path.stem).main


@contextmanager
def called(name: str) -> Iterator[None]:
    """Usage lines begin with what the user typed."""
    before, sys.argv[0] = sys.argv[0], name
    try:
        yield
    finally:
        sys.argv[0] = before


def main(argv: list[str] | None = None) -> int:
    """Hand the rest of the command line to the command; 2 for a command that does not exist."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["convert"]:
        return _dispatch("slime-rl convert", CONVERSIONS, words[1:])
    return _dispatch("slime-rl", COMMANDS, words)


def _dispatch(program: str, commands: dict[str, Command], words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name == "--version":
        print(f"slime_rl {version('slime_rl')}")
        return 0
    if name in ("--help", "-h", "help"):
        print(help_text(program, commands))
        return 0
    if name == "completion" and rest and rest[0] in ("--help", "-h"):
        print(COMPLETION_HELP)
        return 0
    if name == "completion":
        if rest not in ([], *([shell] for shell in SHELLS)):
            print(f"{program} completion: must be {' or '.join(SHELLS)}, got {' '.join(rest)!r}", file=sys.stderr)
            return 2
        print(completion())
        return 0
    if name not in commands:
        known = [*commands, "completion"] if commands is COMMANDS else list(commands)
        near = nearest_flag(name, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
        print(f"{program}: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        with called(f"{program} {name}"):
            return load(commands[name])(rest)
    except ValueError as error:
        print(f"{program} {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
