from __future__ import annotations

from pathlib import Path

from factories import make_config

from slime_rl.config.notes import config_notes


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
