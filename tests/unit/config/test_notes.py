from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_prompts

from slime_rl.config.notes import _READ_BY_SFT, _conditions, config_notes


def test_a_kl_that_is_only_measured_is_noted(tmp_path: Path) -> None:
    notes = config_notes(make_config(tmp_path, "--use-kl-loss", "--save-interval", "5"))
    assert len(notes) == 1 and "--kl-loss-coef 0 only measures" in notes[0]
    used = make_config(tmp_path, "--use-kl-loss", "--kl-loss-coef", "0.1", "--save-interval", "5")
    assert config_notes(used) == []


def test_a_run_without_checkpoints_is_noted(tmp_path: Path) -> None:
    notes = config_notes(make_config(tmp_path))
    assert ["--save-interval" in note for note in notes] == [True]


K = ("--fully-async", "--off-policy-correction", "tis_token")


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("--max-staleness", "4"), "--max-staleness does nothing without --fully-async"),
        (("--over-age", "drop"), "--over-age does nothing without --fully-async or --buffer-max-age"),
        (("--no-wait-for-aging",), "--no-wait-for-aging does nothing without --fully-async"),
        ((*K, "--no-wait-for-aging", "--over-age", "mask"), "--no-wait-for-aging does nothing without"),
        (("--partial-rollout",), "--partial-rollout does nothing where no sample is interrupted"),
        (("--max-group-attempts", "9"), "--max-group-attempts does nothing without --sample-deadline-s"),
        (("--weight-update-mode", "in_place"), "--weight-update-mode does nothing in a synchronous run"),
        ((*K, "--over-sampling-batch-size", "8"), "--over-sampling-batch-size does nothing with --fully-async unless"),
        (("--min-samples-per-group", "8"), "--min-samples-per-group does nothing unless it is less than"),
        (("--min-samples-per-group", "2"), "--min-samples-per-group without --sample-deadline-s only"),
        (
            ("--min-samples-per-group", "1", "--sample-deadline-s", "9"),
            "compares it with nothing, so it teaches nothing",
        ),
        (("--fully-async", "--max-staleness", "0"), "--fully-async --max-staleness 0 is a synchronous run with"),
        ((*K, "--buffer-filter-path", "freshest_first"), "freshest_first with --fully-async leaves groups behind"),
        (("--fully-async",), "--off-policy-correction tis_token weighs them"),
        (("--rollout-ahead", "1"), "--off-policy-correction tis_token weighs them"),
        (("--partial-rollout", "--over-sampling-batch-size", "40"), "--off-policy-correction tis_token weighs them"),
        (
            ("--partial-rollout", "--over-sampling-batch-size", "40", "--buffer-max-age", "0"),
            "--partial-rollout keeps nothing with --buffer-max-age 0",
        ),
        ((*K, "--colocate", "--device", "cpu"), "--fully-async with --colocate: engines give the devices"),
        (
            ("--partial-rollout", "--rollout-function-path", "my.module:loop"),
            "--partial-rollout: read by --rollout-function-path group_loop, not by my.module:loop, which must",
        ),
        (
            ("--loss", "sft", "--n-samples-per-prompt", "1", "--over-age", "drop", "--no-wait-for-aging"),
            "--no-wait-for-aging --over-age: read by --rollout-function-path group_loop, not by a run that generates",
        ),
    ],
)
def test_settings_of_asynchrony_that_do_nothing_or_cost_something_are_noted(
    tmp_path: Path, flags: tuple[str, ...], note: str
) -> None:
    notes = config_notes(make_config(tmp_path, "--save-interval", "5", *flags))
    assert len(notes) == 1 and note in notes[0], notes


@pytest.mark.parametrize(
    "flags",
    [
        ("--over-age", "drop", "--buffer-max-age", "2"),
        ("--max-group-attempts", "9", "--sample-deadline-s", "60", "--min-samples-per-group", "2", "--partial-rollout"),
        (*K, "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--weight-update-mode", "in_place"),
        (*K, "--max-staleness", "4", "--no-wait-for-aging", "--over-age", "drop", "--over-sampling-batch-size", "40"),
        ("--fully-async", "--policy-loss", "decoupled_ppo"),
    ],
)
def test_settings_of_asynchrony_that_belong_together_are_not(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert config_notes(make_config(tmp_path, "--save-interval", "5", *flags)) == []


def test_an_evaluation_whose_samples_are_all_the_same_is_noted(tmp_path: Path) -> None:
    sets = ("--eval-prompt-data", "a", str(write_prompts(tmp_path / "a.jsonl")), "b", str(tmp_path / "a.jsonl"))
    several = (*sets, "--save-interval", "5", "--eval-override", "b:eval-n-samples-per-prompt=8")
    (note,) = config_notes(make_config(tmp_path, *several))
    assert note.startswith("evaluation set b: 8 samples per prompt at --eval-temperature 0 are all the same")
    assert config_notes(make_config(tmp_path, *several, "--eval-temperature", "1")) == []
    only = config_notes(make_config(tmp_path, *sets, "--num-steps", "0", "--fully-async"))
    assert only == []  # nothing is trained on older tokens


def test_a_band_that_no_filter_reads_is_noted(tmp_path: Path) -> None:
    band = ("--save-interval", "5", "--reward-band", "0.2", "0.8")
    assert config_notes(make_config(tmp_path, *band)) == [
        "--reward-band does nothing without --dynamic-filter-path reward_band"
    ]
    for reader in ("reward_band", "my.module:filter"):
        assert config_notes(make_config(tmp_path, *band, "--dynamic-filter-path", reader)) == []


def test_flags_of_algorithms_that_the_run_does_not_have_are_noted(tmp_path: Path) -> None:
    def notes(*flags: str) -> str:
        return " ".join(config_notes(make_config(tmp_path, "--save-interval", "5", *flags)))

    assert notes("--lambd", "0.9") == "--lambd does nothing without --advantage-estimator gae"
    assert notes("--lambd", "0.9", "--gamma", "0.9", "--advantage-estimator", "gae") == ""
    assert notes("--lambd", "0.9", "--advantage-estimator", "my.module:estimator") == ""
    both = ("--sapo-tau-pos", "2", "--sapo-tau-neg", "2")
    assert notes(*both) == "--sapo-tau-pos --sapo-tau-neg do nothing without --policy-loss sapo"
    assert notes(*both, "--policy-loss", "sapo") == ""
    assert "--tis-clip" not in notes("--off-policy-upper", "3", "--off-policy-correction", "tis_token")
    assert "--off-policy-upper does nothing" in notes("--off-policy-upper", "3")
    assert "--ref-load does nothing" in notes("--ref-load", str(tmp_path / "model"))
    assert "makes the same" in notes("--old-log-probs", "rollout", "--off-policy-correction", "tis_token")
    sft = ("--loss", "sft", "--n-samples-per-prompt", "1")
    assert (
        notes(*sft, "--policy-loss", "gspo", "--entropy-coef", "0.1")
        == "--policy-loss: read by nothing with --loss sft"
    )


def test_every_flag_of_the_table_is_one(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for names, _, _ in _conditions(config):
        assert all(hasattr(config.algorithm, name) for name in names), names
    assert all(hasattr(config.algorithm, name) for name in _READ_BY_SFT)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "mistral", "sliding_window": 7}, "sliding_window = 7"),
        ({"model_type": "mistral", "sliding_window": 10**6}, None),
        ({"model_type": "mixtral", "head_dim": 16, "hidden_size": 48, "num_attention_heads": 4}, "head_dim = 16"),
        ({"model_type": "mixtral", "head_dim": 12, "hidden_size": 48, "num_attention_heads": 4}, None),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, r"mlp_only_layers = [1]"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 1}, None),
        ({"model_type": "qwen3", "head_dim": 16, "hidden_size": 48, "num_attention_heads": 4}, None),
    ],
)
def test_fields_that_the_engine_reads_over_are_noted(fields: dict[str, Any], named: str | None, tmp_path: Path) -> None:
    config = make_config(tmp_path, "--save-interval", "5")
    (Path(config.model.hf_checkpoint) / "config.json").write_text(json.dumps(fields))
    notes = config_notes(config)
    assert len(notes) == (named is not None)
    assert named is None or f"SGLang takes no notice of {named};" in notes[0]
