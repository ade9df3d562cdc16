"""Settings that are allowed but are seldom what was meant."""

from __future__ import annotations

from slime_rl.config.config import Config


def config_notes(config: Config) -> list[str]:
    """One sentence each, with the flag to change. Printed when a run starts and by --dry-run."""
    algorithm, train = config.algorithm, config.train
    notes = []
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        notes.append(
            "--use-kl-loss with --kl-loss-coef 0 only measures the KL (train/kl_loss) and pays a forward pass of the "
            "reference for it; give a coefficient > 0, or leave the flag out"
        )
    if config.checkpoint.save_interval is None and train.num_steps > 0:
        notes.append("no checkpoint is written, so a broken-off run starts anew; --save-interval N writes them")
    if train.loss == "policy" and train.n_samples_per_prompt == 1 and algorithm.advantage_estimator == "grpo":
        notes.append(
            "--n-samples-per-prompt 1 gives grpo no group to compare with: every advantage is 0; ask for more samples, "
            "or another --advantage-estimator"
        )
    return notes
