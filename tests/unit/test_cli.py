from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from slime_rl.cli import COMMANDS, CONVERSIONS, completion, load, main
from slime_rl.config import make_parser

CALLS = [[name] for name in COMMANDS if name != "convert"] + [["convert", name] for name in CONVERSIONS]


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_has_a_main_whose_help_ends_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "usage:" in text
    if words[0] in ("dashboard", "doctor", "plan"):  # also started as python -m slime_rl.NAME
        assert "usage: python -m slime_rl" in text
    elif words[0] != "train":
        assert f"usage: slime-rl {' '.join(words)}" in text
    command = (CONVERSIONS if words[0] == "convert" else COMMANDS)[words[-1]]
    if words[0] != "train":
        told = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
        assert sorted({*told} - {"--help"}) == sorted(command.flags.split())


def test_a_process_that_a_tool_starts_finds_the_tool() -> None:
    run = load(COMMANDS["inspect"])
    found = subprocess.run(
        [sys.executable, "-c", f"import {run.__module__}"], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert found.returncode == 0  # multiprocessing gives its children the parent's sys.path


def test_train_help_is_grouped_by_concern(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.index("Model: what is trained") < text.index("Optimizer: AdamW") < text.index("Logging: what the run")


def test_a_command_gets_the_rest_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "qwen3-0.6b", "--gpu", "h100-80g", "--json"]) == 0
    assert '"parameters": 596049920' in capsys.readouterr().out


def test_a_misspelled_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trains"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert main(["sing"]) == 2
    assert "there are train, plan" in capsys.readouterr().err
    assert main(["convert", "hf-to-torchdist"]) == 2
    assert "did you mean hf-to-torch-dist?" in capsys.readouterr().err


def test_no_command_prints_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_bash_completes_commands_and_flags() -> None:
    def complete(*words: str) -> list[str]:
        script = f"{completion()}\nCOMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n_slime_rl\n"
        return subprocess.check_output(["bash", "-c", script + 'echo "${COMPREPLY[@]}"'], text=True).split()

    assert complete("slime-rl", "do") == ["doctor"]
    assert complete("slime-rl", "train", "--rollout-batch") == ["--rollout-batch-size"]
    assert set(complete("slime-rl", "plan", "--lr")) <= make_parser().flags
    assert complete("slime-rl", "plan", "--shap") == ["--shape"]
    assert complete("slime-rl", "dashboard", "--p") == ["--port"]
    assert complete("slime-rl", "convert", "torch") == ["torch-dist-to-hf"]
    assert complete("slime-rl", "convert", "torch-dist-to-hf", "--inp") == ["--input-dir"]


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 2
    assert "must be bash, got 'zsh'" in capsys.readouterr().err


def test_version_and_how_to_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"slime_rl \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["completion", "--help"]) == 0
    assert 'eval "$(slime-rl completion bash)"' in capsys.readouterr().out
    assert main(["completon"]) == 2
    assert "did you mean completion?" in capsys.readouterr().err
