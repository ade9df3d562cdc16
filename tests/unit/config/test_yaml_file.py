from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_keys_are_flags_and_pass_the_same_parsing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "num_steps: 5\nlr: 1e-4\nshuffle: false\ntensorboard: true\nrollout-top-k: -1\nrollout_stop: [a, b]\n"
        "sglang-log-level: info\n",
    )
    config = make_config(tmp_path, "--config", path)
    assert config.train.num_steps == 5
    assert config.optimizer.lr == 1e-4
    assert config.data.shuffle is False
    assert config.logging.tensorboard is True
    assert config.sampling.rollout_stop == ("a", "b")
    assert config.engine.sglang_args == ("--log-level", "info")


def test_command_line_wins_over_the_file_wherever_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path, "num_steps: 5\n")
    assert make_config(tmp_path, "--num-steps", "7", "--config", path).train.num_steps == 7


def test_file_can_be_joined_by_an_equals_sign(tmp_path: Path) -> None:
    path = write(tmp_path, "num_steps: 5\n")
    assert make_config(tmp_path, f"--config={path}").train.num_steps == 5


def test_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    first = write(tmp_path, "num_steps: 5\nseed: 3\n")
    second = tmp_path / "second.yaml"
    second.write_text("num_steps: 6\n")
    config = make_config(tmp_path, "--config", first, "--config", str(second))
    assert (config.train.num_steps, config.train.seed) == (6, 3)


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert make_config(tmp_path, "--config", write(tmp_path, "# nothing\n")).train.num_steps == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmu_steps: 5\n", r"unknown flag --nmu-steps; did you mean --num-steps\?"),
        ("num_steps: -5\n", r"--num-steps must be >= 0, got -5"),
        ("num_steps: many\n", r"--num-steps.*: invalid int value: 'many'"),
        ("num_steps:\n", r"num_steps must have a value .*, got None"),
        ("train:\n  num_steps: 5\n", r"train must have a value .*, got \{'num_steps': 5\}"),
        ("- num_steps\n", r"must be a mapping of flag names to values, got list"),
        ("num_steps: [1\n", r"not YAML"),
        ("config: other.yaml\n", r"cannot name another one"),
    ],
)
def test_bad_files_are_told_like_bad_flags(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, "--config", write(tmp_path, text))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config must be a file that exists, got 'nowhere\.yaml'"):
        make_config(tmp_path, "--config", "nowhere.yaml")
    with pytest.raises(ValueError, match="--config needs a file"):
        make_config(tmp_path, "--config")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed: 3\nlearnin_rate: 1e-4\n", "learnin_rate: unknown flag --learnin-rate; did you mean --lr"),
        ("num_steps: many\n", "num_steps: argument --num-steps"),
        ("seed: 3\nseed: 4\n", "line 2: seed is there twice, first in line 1"),
        ("num-steps: 3\nnum_steps: 4\n", "line 2: num_steps is there twice, first in line 1"),
        ("loss: [policy, sft]\n", "loss: "),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        make_config(tmp_path, "--config", path)
    assert f"--config {path}: {named}" in str(caught.value)
