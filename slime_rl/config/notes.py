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
    return notes + _asynchrony_notes(config)


def _asynchrony_notes(config: Config) -> list[str]:
    options, notes = config.asynchrony, []
    if not options.fully_async and options.max_staleness != 1:
        notes.append("--max-staleness does nothing without --fully-async")
    bounded = options.fully_async or config.buffer.buffer_max_age is not None
    if not bounded and options.over_age != "requeue":
        notes.append("--over-age does nothing without --fully-async or --buffer-max-age")
    interrupts = (
        options.fully_async
        or options.sample_deadline_s is not None
        or config.buffer.over_sampling_batch_size is not None
    )
    if options.partial_rollout and not interrupts:
        notes.append(
            "--partial-rollout does nothing where no sample is interrupted: --over-sampling-batch-size, "
            "--sample-deadline-s and --fully-async interrupt some"
        )
    if options.min_samples_per_group is not None and options.sample_deadline_s is None:
        notes.append(
            "--min-samples-per-group without --sample-deadline-s only lets groups train without failed samples"
        )
    corrected = config.algorithm.off_policy_correction != "none" or config.algorithm.policy_loss == "decoupled_ppo"
    if config.steps_ahead > 0 and config.train.loss == "policy" and not corrected:
        notes.append(
            "tokens of older weights are trained on as if they were new; --off-policy-correction tis_token weighs them"
        )
    return notes
