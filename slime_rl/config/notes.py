"""Settings that are allowed but are seldom what was meant."""

from __future__ import annotations

from slime_rl.config.asynchrony_notes import asynchrony_notes, changed_flags
from slime_rl.config.config import Config
from slime_rl.config.engine_notes import engine_notes
from slime_rl.config.evaluation import for_evaluation


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
    if config.buffer.dynamic_filter_path != "reward_band" and changed_flags(config.buffer, "reward_band"):
        is_own = ":" in (config.buffer.dynamic_filter_path or "")  # may read it, too
        notes += [] if is_own else ["--reward-band does nothing without --dynamic-filter-path reward_band"]
    if config.cluster.rollout_external_engine_addrs and config.engine.sglang_args:
        given = " ".join(word for word in config.engine.sglang_args if word.startswith("--"))
        notes.append(
            f"{given} (--sglang-*): read by nothing with --rollout-external-engine-addrs, whose servers run already"
        )
    return notes + engine_notes(config) + _evaluation_notes(config) + _unused_notes(config) + asynchrony_notes(config)


def _evaluation_notes(config: Config) -> list[str]:
    sets = {name: for_evaluation(config, name).evaluation for name, _ in config.evaluation.datasets}
    return [
        f"evaluation set {name}: {own.eval_n_samples_per_prompt} samples per prompt at --eval-temperature 0 are all "
        "the same; give it a temperature > 0"
        for name, own in sets.items()
        if own.eval_n_samples_per_prompt > 1 and own.eval_temperature == 0
    ]


def _unused_notes(config: Config) -> list[str]:
    """Flags of algorithms that the run does not have."""
    if config.train.loss == "sft":
        given = _given(config, *(name for name in vars(config.algorithm) if name not in _READ_BY_SFT))
        return [f"{' '.join(given)}: read by nothing with --loss sft"] if given else []
    algorithm, notes = config.algorithm, []
    bypass = algorithm.old_log_probs == "rollout"
    if bypass and (algorithm.off_policy_correction not in ("none", "opsm") or algorithm.off_policy_rejection):
        notes.append(
            "--off-policy-correction and --off-policy-rejection compare the trainer's old log-probs with the engine's, "
            "which --old-log-probs rollout makes the same"
        )
    if config.model.ref_load is not None and not algorithm.needs_reference:
        notes.append("--ref-load does nothing without --use-kl-loss or --kl-coef")
    for names, needed, is_met in _conditions(config):
        if not is_met and (given := _given(config, *names)):
            notes.append(f"{' '.join(given)} {'do' if len(given) > 1 else 'does'} nothing without {needed}")
    return notes


# Of AlgorithmConfig, by supervised training.
_READ_BY_SFT = (
    *("loss_aggregation", "loss_norm_length", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    *("entropy_coef", "overlong_filter"),
)


def _conditions(config: Config) -> list[tuple[tuple[str, ...], str, bool]]:
    """(fields of AlgorithmConfig, what they need, whether it is there). A plugin of one's own may read any of them."""
    algorithm = config.algorithm
    estimator, loss, correction = algorithm.advantage_estimator, algorithm.policy_loss, algorithm.off_policy_correction
    rules = set(algorithm.off_policy_rejection)

    def has(name: str, *wanted: str) -> bool:
        return ":" in name or name in wanted

    return [
        (
            ("loss_norm_length",),
            "--loss-aggregation seq-mean-token-sum-norm",
            algorithm.loss_aggregation == "seq-mean-token-sum-norm",
        ),
        (("grpo_std_normalization",), "--advantage-estimator grpo", has(estimator, "grpo", "grpo_passk")),
        (("gamma",), "an estimator of returns", has(estimator, "reinforce", "reinforce_plus_plus", "remax", "gae")),
        (("lambd", "value_clip"), "--advantage-estimator gae", has(estimator, "gae")),
        (("kl_horizon",), "--kl-target", algorithm.kl_target is not None),
        (("kl_reward_type",), "--kl-coef", algorithm.kl_coef > 0),
        (("kl_loss_type",), "--use-kl-loss", algorithm.use_kl_loss),
        (("off_policy_upper",), "--off-policy-correction", not has(correction, "none", "opsm") or ":" in correction),
        (
            ("off_policy_lower",),
            "a correction with a lower bound",
            has(correction, "icepop", "geometric_rejection", "sequence_rejection"),
        ),
        (
            ("off_policy_rejection_upper", "off_policy_rejection_lower"),
            "--off-policy-rejection",
            bool(rules & {"token", "sequence", "geometric", "sequence_max"}),
        ),
        (("off_policy_rejection_kl",), "--off-policy-rejection", bool(rules & {"mean_k2", "mean_k3"})),
        (("opsm_delta",), "--off-policy-correction opsm", has(correction, "opsm") or "opsm" in rules),
        (("proximal_policy", "behave_weight_cap"), "--policy-loss decoupled_ppo", has(loss, "decoupled_ppo")),
        (("sapo_tau_pos", "sapo_tau_neg"), "--policy-loss sapo", has(loss, "sapo")),
        (("cov_ratio",), "--policy-loss clip_cov or kl_cov", has(loss, "clip_cov", "kl_cov")),
        (("clip_cov_lower", "clip_cov_upper"), "--policy-loss clip_cov", has(loss, "clip_cov")),
        (("kl_cov_coef",), "--policy-loss kl_cov", has(loss, "kl_cov")),
        (("distillation_reward_coef",), "--policy-loss distillation", has(loss, "distillation")),
        (("eps_clip", "eps_clip_high"), "a clipped loss", not has(loss, "sapo", "gpg", "kl_cov") or ":" in loss),
        (
            ("eps_clip_c",),
            "a loss with PPO's clip",
            has(loss, "ppo_clip", "gspo", "clip_cov", "decoupled_ppo", "distillation"),
        ),
        (("overlong_penalty",), "--overlong-buffer-len", algorithm.overlong_buffer_len is not None),
    ]


def _given(config: Config, *names: str) -> list[str]:
    """Flags of those fields of AlgorithmConfig that are not at their default."""
    return changed_flags(config.algorithm, *names)
