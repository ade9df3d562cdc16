from __future__ import annotations

from pathlib import Path

from factories import make_config

from slime_rl.config.notes import _READ_BY_SFT, _conditions, config_notes


def test_a_kl_that_is_only_measured_is_noted(tmp_path: Path) -> None:
    notes = config_notes(make_config(tmp_path, "--use-kl-loss", "--save-interval", "5"))
    assert len(notes) == 1 and "--kl-loss-coef 0 only measures" in notes[0]
    used = make_config(tmp_path, "--use-kl-loss", "--kl-loss-coef", "0.1", "--save-interval", "5")
    assert config_notes(used) == []


def test_a_run_without_checkpoints_is_noted(tmp_path: Path) -> None:
    notes = config_notes(make_config(tmp_path))
    assert ["--save-interval" in note for note in notes] == [True]


def test_settings_of_asynchrony_that_do_nothing_are_noted(tmp_path: Path) -> None:
    def notes(*flags: str) -> str:
        return " ".join(config_notes(make_config(tmp_path, "--save-interval", "5", *flags)))

    assert "--max-staleness does nothing without --fully-async" in notes("--max-staleness", "4")
    assert "--over-age does nothing without" in notes("--over-age", "drop")
    assert notes("--over-age", "drop", "--buffer-max-age", "2") == ""
    assert "--partial-rollout does nothing" in notes("--partial-rollout")
    assert "--min-samples-per-group without" in notes("--min-samples-per-group", "2")
    assert "--off-policy-correction tis_token" in notes("--fully-async")
    assert "--off-policy-correction tis_token" in notes("--rollout-ahead", "1")
    assert notes("--fully-async", "--off-policy-correction", "tis_token", "--partial-rollout") == ""
    assert notes("--fully-async", "--policy-loss", "decoupled_ppo") == ""


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
