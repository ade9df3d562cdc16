from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from factories import make_config, write_model_folder, write_prompts

from slime_rl.config import SECTIONS, make_parser, parse_config
from slime_rl.config.flags import NEEDLESS, SYNONYMS, field_docs, flag_name, nearest_flag


def test_every_field_has_a_help_text_below_it() -> None:
    bare = [
        f"{cls.__name__}.{item.name}"
        for cls in SECTIONS.values()
        for item in dataclasses.fields(cls)
        if not field_docs(cls).get(item.name)
    ]
    assert bare == []


def test_no_flag_is_defined_twice() -> None:
    names = [item.name for cls in SECTIONS.values() for item in dataclasses.fields(cls)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_help_shows_every_flag_under_its_concern() -> None:
    text = make_parser().format_help()
    for cls in SECTIONS.values():
        for item in dataclasses.fields(cls):
            if not item.metadata.get("passthrough"):
                assert flag_name(item.name) in text
        assert (cls.__doc__ or "").splitlines()[0].rstrip(".") in text


def test_values_have_the_type_of_their_field(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        "--num-steps",
        "1_000",
        "--lr",
        "2e-4",
        "--no-shuffle",
        "--rollout-stop",
        "</a>",
        "END",
        "--loss=policy",
    )
    assert config.train.num_steps == 1000
    assert config.optimizer.lr == 2e-4
    assert config.data.shuffle is False
    assert config.sampling.rollout_stop == ("</a>", "END")
    assert config.train.loss == "policy"


def test_aliases_of_slime_set_the_same_field(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, "--num-rollout", "7", "--tp-size", "1", "--sglang-server-concurrency", "9", "--use-tensorboard"
    )
    assert config.train.num_steps == 7
    assert config.rollout.rollout_concurrency == 9
    assert config.logging.tensorboard is True


def test_config_is_frozen(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 2  # type: ignore[misc]


def test_misspelled_flag_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown flag --rollout-batchsize; did you mean --rollout-batch-size\?"):
        make_config(tmp_path, "--rollout-batchsize", "4")


def test_misspelled_required_flag_is_named_instead_of_missing() -> None:
    with pytest.raises(ValueError, match=r"unknown flag --hf-chekpoint; did you mean --hf-checkpoint\?"):
        parse_config(["--hf-chekpoint", "model"])


def test_underscores_are_answered_with_the_right_spelling(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean --num-steps\?"):
        make_config(tmp_path, "--num_steps=4")


def test_unknown_flag_like_no_other_points_to_help(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown flag --zzz; see --help"):
        make_config(tmp_path, "--zzz")


def test_abbreviated_flag_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown flag --num-step"):
        make_config(tmp_path, "--num-step", "4")


def test_stray_word_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unexpected argument 'stray'"):
        make_config(tmp_path, "--num-steps", "4", "stray")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--num-steps", "many"], ["--num-steps", "invalid int value", "'many'"]),
        (["--num-steps", "1.5"], ["--num-steps", "invalid int value", "'1.5'"]),
        (["--lr", "fast"], ["--lr", "invalid float value", "'fast'"]),
        (["--loss", "ppo"], ["--loss", "invalid choice", "'ppo'", "policy", "sft"]),
        (["--num-steps"], ["--num-steps", "expected one argument"]),
    ],
)
def test_value_of_the_wrong_kind_names_flag_rule_and_value(tmp_path: Path, flags: list[str], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make_config(tmp_path, *flags)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_missing_required_flag_is_named() -> None:
    with pytest.raises(ValueError, match="--hf-checkpoint"):
        parse_config([])


def test_passthrough_flags_reach_their_program_without_prefix(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        *("--sglang-log-level", "info", "--num-steps", "3", "--sglang-disable-radix-cache"),
        *("--router-log-dir", "logs", "--megatron-num-layers-in-first-stage=2", "--seed", "5"),
    )
    assert config.engine.sglang_args == ("--log-level", "info", "--disable-radix-cache")
    assert config.router.router_args == ("--log-dir", "logs")
    assert config.model.megatron_args == ("--num-layers-in-first-stage=2",)
    assert (config.train.num_steps, config.train.seed) == (3, 5)


def test_own_flag_with_a_passthrough_prefix_stays_ours(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--router-log-dir", "logs", "--router-policy=random", "--num-steps", "2")
    assert config.router.router_policy == "random"
    assert config.router.router_args == ("--log-dir", "logs")
    assert config.train.num_steps == 2


def test_checkpoint_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hf-checkpoint must be a folder that contains config.json, got '.*'"):
        parse_config(["--hf-checkpoint", str(tmp_path), "--num-steps", "0"])


def test_only_evaluating_needs_no_prompts(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    heldout = write_prompts(tmp_path / "heldout.jsonl")
    flags = ["--hf-checkpoint", str(model), "--num-steps", "0"]
    assert parse_config([*flags, "--eval-prompt-data", "heldout", str(heldout)]).data.prompt_data is None
    with pytest.raises(ValueError, match="--num-steps may be 0 only with --eval-prompt-data"):
        parse_config(flags)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learnin-rate", "--lr"),
        ("--rollout-batch-sise", "--rollout-batch-size"),
        ("--kl-loss-coeff", "--kl-loss-coef"),
        ("--group-size", "--n-samples-per-prompt"),
        ("--foo-bar", None),
        ("--seq-length", None),
    ],
)
def test_only_a_flag_that_was_likely_meant_is_suggested(typed: str, meant: str | None) -> None:
    assert nearest_flag(typed, make_parser().flags) == meant


def test_every_synonym_stands_for_a_flag() -> None:
    assert set(SYNONYMS.values()) <= make_parser().flags


def test_what_the_checkpoint_or_the_packing_decides_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--num-layers; leave it out: the model's shape is read from the config.json"):
        make_config(tmp_path, "--num-layers", "36")
    with pytest.raises(ValueError, match=r"--balance-data; leave it out: samples are always balanced"):
        make_config(tmp_path, "--balance-data")
    assert not set(NEEDLESS) & make_parser().flags
