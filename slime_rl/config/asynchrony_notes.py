"""Notes on flags of asynchrony: what does nothing in this run, and what costs something that is easily overlooked."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime_rl.config.algorithm import GROUP_ESTIMATORS
from slime_rl.config.config import Config


def asynchrony_notes(config: Config) -> list[str]:
    """One sentence each, with the flag to change."""
    options, function = config.asynchrony, config.rollout.rollout_function_path
    ours = "group_loop" if function == "auto" else function
    if config.train.loss == "sft" or config.rollout.load_rollouts is not None or ours != "group_loop":
        given = changed_flags(options, *vars(options))
        given += changed_flags(config.buffer, "over_sampling_batch_size", "buffer_max_age")
        is_own = ours not in ("group_loop", "sft", "dumped")
        what = f"{function}, which must see to it itself" if is_own else "a run that generates nothing"
        note = f"{' '.join(given)}: read by --rollout-function-path group_loop, not by {what}"
        return ([note] if given else []) + (_costly_notes(config) if is_own else [])
    notes = [
        f"{' '.join(given)} {'do' if len(given) > 1 else 'does'} nothing {why}"
        for given, why, is_met in _conditions(config)
        if given and not is_met
    ]
    return notes + _costly_notes(config)


def _conditions(config: Config) -> list[tuple[list[str], str, bool]]:
    """(flags that are given, what they do nothing without, whether it is there)."""
    options, over_sampling = config.asynchrony, config.buffer.over_sampling_batch_size
    bounded, late = config.max_age is not None, options.sample_deadline_s is not None
    waits = options.is_continuous and options.over_age != "mask"
    batch_size, samples = config.train.rollout_batch_size, config.train.n_samples_per_prompt
    in_flight = options.is_continuous or config.rollout.rollout_ahead > 0
    return [
        (changed_flags(options, "max_staleness"), "without --fully-async", options.fully_async),
        (changed_flags(options, "over_age"), "without --fully-async or --buffer-max-age", bounded),
        (
            changed_flags(options, "wait_for_aging"),
            "without --fully-async, with --max-staleness 0 and with --over-age mask: no step waits for aging groups",
            waits,
        ),
        (
            changed_flags(options, "partial_rollout"),
            "where no sample is interrupted: --over-sampling-batch-size, --sample-deadline-s and --fully-async "
            "interrupt some",
            options.is_continuous or late or over_sampling is not None,
        ),
        (
            changed_flags(options, "max_group_attempts"),
            "without --sample-deadline-s, --fully-async or --buffer-max-age: no group is late or over age",
            bounded or late,
        ),
        (
            changed_flags(config.rollout, "weight_update_mode"),
            "in a synchronous run: no request is in flight when weights are updated",
            in_flight,
        ),
        (
            changed_flags(config.buffer, "over_sampling_batch_size"),
            f"with --fully-async unless it is more than --rollout-batch-size ({batch_size})",
            not options.is_continuous or (over_sampling or 0) > batch_size,
        ),
        (
            changed_flags(options, "min_samples_per_group"),
            f"unless it is less than --n-samples-per-prompt ({samples})",
            (options.min_samples_per_group or 0) < samples,
        ),
    ]


def _costly_notes(config: Config) -> list[str]:
    """What works, at a price that is easily overlooked."""
    options, notes = config.asynchrony, []
    if options.fully_async and not options.is_continuous:
        notes.append(
            "--fully-async --max-staleness 0 is a synchronous run with --buffer-max-age 0: nothing is generated while "
            "the trainer works"
        )
    elif config.cluster.colocate and config.steps_ahead > 0:
        ahead = "--fully-async" if options.fully_async else "--rollout-ahead"
        notes.append(f"{ahead} with --colocate: engines give the devices to the trainer, so both do not work at once")
    order = config.buffer.buffer_filter_path
    if options.is_continuous and options.over_age != "mask" and order != "stalest_first":
        notes.append(
            f"--buffer-filter-path {order} with --fully-async leaves groups behind until they are over "
            "--max-staleness, stalest_first does not"
        )
    lives_on = options.over_age == "mask" or options.sample_deadline_s is not None
    if options.partial_rollout and config.max_age == 0 and not lives_on:
        bound = "--max-staleness" if options.fully_async else "--buffer-max-age"
        notes.append(
            f"--partial-rollout keeps nothing with {bound} 0: tokens of the step before are over age; --over-age mask "
            "continues them"
        )
    needs_deadline = options.sample_deadline_s is None and options.min_samples_per_group is not None
    if needs_deadline and (options.min_samples_per_group or 0) < config.train.n_samples_per_prompt:
        notes.append(
            "--min-samples-per-group without --sample-deadline-s only lets groups train without failed samples"
        )
    estimator = config.algorithm.advantage_estimator
    if options.min_samples_per_group == 1 < config.train.n_samples_per_prompt and estimator in GROUP_ESTIMATORS:
        notes.append(
            f"--min-samples-per-group 1 with --advantage-estimator {estimator}: a group that is left with one sample "
            "compares it with nothing, so it teaches nothing; 2 or more"
        )
    corrected = config.algorithm.off_policy_correction != "none" or config.algorithm.policy_loss == "decoupled_ppo"
    continues = options.partial_rollout and config.max_age != 0 and not options.mask_offpolicy_in_partial_rollout
    is_older = config.steps_ahead > 0 or (continues and config.buffer.over_sampling_batch_size is not None)
    if is_older and config.train.loss == "policy" and config.train.num_steps > 0 and not corrected:
        notes.append(
            "tokens of older weights are trained on as if they were new; --off-policy-correction tis_token weighs them"
        )
    return notes


def changed_flags(section: Any, *names: str) -> list[str]:
    """Flags of those fields of a section that are not at their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    changed = [name for name in names if getattr(section, name) != defaults[name]]
    return [("--no-" if defaults[name] is True else "--") + name.replace("_", "-") for name in changed]
