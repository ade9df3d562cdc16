"""Every rule: the error names the flag, the rule and the value received."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from factories import make_config, write_prompts

RULES = [
    ("--rollout-batch-size", "0", "must be > 0", "0"),
    ("--n-samples-per-prompt", "-1", "must be > 0", "-1"),
    ("--num-steps", "-1", "must be >= 0", "-1"),
    ("--num-updates-per-rollout", "7", "must divide", "7"),
    ("--num-epochs-per-rollout", "0", "must be > 0", "0"),
    ("--global-batch-size", "10", "must equal --rollout-batch-size x --n-samples-per-prompt", "10"),
    ("--max-tokens-per-worker", "0", "must be > 0", "0"),
    ("--micro-batch-size", "0", "must be > 0", "0"),
    ("--lr", "-1.0", "must be >= 0", "-1.0"),
    ("--min-lr", "1.0", "must be <= --lr", "1.0"),
    ("--lr", "nan", "must be >= 0", "nan"),
    ("--lr", "inf", "must be finite", "inf"),
    ("--rollout-temperature", "inf", "must be finite", "inf"),
    ("--seed", "-1", "must be in [0, 2147483647]", "-1"),
    ("--seed", "2147483648", "must be in [0, 2147483647]", "2147483648"),
    ("--engine-mem-fraction", "1.5", "must be in (0, 1]", "1.5"),
    ("--eps-clip-c", "inf", "must be finite", "inf"),
    ("--stop-at-eval-accuracy", "nan", "must be finite", "nan"),
    ("--reward-mixture", "math=nan", "takes finite weights", "math=nan"),
    ("--prometheus-address", "h:70000", "must be HOST:PORT", "h:70000"),
    ("--reward-url", "localhost:80", "must begin with http://", "localhost:80"),
    ("--adam-beta1", "1.0", r"must be in [0, 1)", "1.0"),
    ("--adam-eps", "0", "must be > 0", "0.0"),
    ("--lr-decay-updates", "0", "must be > 0", "0"),
    ("--eps-clip", "1.5", "must be < 1", "1.5"),
    ("--eps-clip-c", "0.5", "must be > 1", "0.5"),
    ("--gamma", "1.5", "must be in [0, 1]", "1.5"),
    ("--lambd", "-0.5", "must be in [0, 1]", "-0.5"),
    ("--kl-coef", "-0.5", "must be >= 0", "-0.5"),
    ("--kl-loss-coef", "0.5", "needs --use-kl-loss", "0.5"),
    ("--rollout-temperature", "0", "must be > 0", "0.0"),
    ("--rollout-top-p", "0", "must be in (0, 1]", "0.0"),
    ("--rollout-top-k", "0", "must be -1 or > 0", "0"),
    ("--max-response-len", "0", "must be > 0", "0"),
    ("--rollout-ahead", "-1", "must be >= 0", "-1"),
    ("--rollout-concurrency", "0", "must be > 0", "0"),
    ("--reward-timeout-s", "0", "must be > 0", "0.0"),
    ("--eval-top-p", "2.0", "must be in (0, 1]", "2.0"),
    ("--eval-temperature", "inf", "must be finite", "inf"),
    ("--eval-interval", "5", "needs --eval-prompt-data", "5"),
    ("--eval-prompt-data", "name", "takes pairs NAME FILE", "name"),
    ("--train-num-workers", "0", "must be > 0", "0"),
    ("--start-timeout-s", "0", "must be > 0", "0.0"),
    ("--sequence-parallel", None, "needs --tensor-model-parallel-size > 1", "1"),
    ("--save-interval", "0", "must be > 0", "0"),
    ("--keep-checkpoints", "0", "must be > 0", "0"),
    ("--load", "no/such/folder", "must be a folder that exists", "no/such/folder"),
    ("--prompt-data", "no/such/file.jsonl", "must be a file that exists", "no/such/file.jsonl"),
    ("--ref-load", "no/such/folder", "must be a folder that exists", "no/such/folder"),
    ("--teacher-load", "no/such/folder", "must be a folder that exists", "no/such/folder"),
    ("--policy-loss", "distillation", "needs --teacher-load", "distillation"),
    ("--ref-update-interval", "0", "must be > 0", "0"),
    ("--ref-update-interval", "5", "needs a reference", "5"),
    ("--kl-target", "0.1", "needs --kl-coef > 0", "0.1"),
    ("--n-samples-per-prompt", "1", "must be > 1 with --advantage-estimator grpo", "1"),
    ("--critic-lr", "1e-3", "needs --advantage-estimator gae", "0.001"),
    ("--critic-warmup-steps", "-1", "must be >= 0", "-1"),
    ("--critic-num-workers", "1", "needs --advantage-estimator gae", "1"),
    ("--critic-num-workers", "-1", "must be >= 0", "-1"),
    ("--critic-load", "no/such/folder", "must be a folder that exists", "no/such/folder"),
    ("--dump-train-steps", "-1", "must be >= 0", "-1"),
    ("--freeze-params", "[", "must be regular expressions", "["),
    ("--log-samples", "-1", "must be >= 0", "-1"),
    ("--weight-sync-bucket-bytes", "0", "must be > 0", "0"),
    ("--engine-health-timeout-s", "0", "must be > 0", "0.0"),
    ("--mask-offpolicy-in-partial-rollout", None, "needs --partial-rollout", "True"),
    ("--sample-deadline-s", "3600", "must be < --group-timeout-s (3600)", "3600.0"),
    ("--stop-at-eval-accuracy", "0.9", "needs --eval-prompt-data", "None"),
]


@pytest.mark.parametrize(
    ("flag", "value", "rule", "shown"), RULES, ids=[f"{flag}={value}" for flag, value, *_ in RULES]
)
def test_error_names_flag_rule_and_value(tmp_path: Path, flag: str, value: str | None, rule: str, shown: str) -> None:
    with pytest.raises(ValueError) as error:
        make_config(tmp_path, flag, *([] if value is None else [value]))
    message = str(error.value)
    assert message.startswith(flag), message
    assert rule in message and f"got {shown}" in message.replace("'", "").replace("(", "").replace(",)", ""), message


def test_workers_must_fill_whole_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--train-num-workers must be a multiple of .* = 2, got 3"):
        make_config(tmp_path, "--train-num-workers", "3", "--tensor-model-parallel-size", "2")


def test_supervised_training_takes_one_sample_per_row_and_a_label(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--n-samples-per-prompt must be 1 with --loss sft .*, got 8"):
        make_config(tmp_path, "--loss", "sft")
    with pytest.raises(ValueError, match="--label-key is needed with --loss sft, got 'none'"):
        make_config(tmp_path, "--loss", "sft", "--n-samples-per-prompt", "1", "--label-key", "none")


def test_supervised_training_has_no_rewards_to_take_a_kl_off(tmp_path: Path) -> None:
    sft = ["--loss", "sft", "--n-samples-per-prompt", "1"]
    with pytest.raises(ValueError, match=r"--kl-coef needs rewards: --loss policy, got 0\.1"):
        make_config(tmp_path, *sft, "--kl-coef", "0.1")
    with pytest.raises(ValueError, match="--critic-lr needs --advantage-estimator gae and --loss policy"):
        make_config(tmp_path, *sft, "--advantage-estimator", "gae", "--critic-lr", "1e-3")


def test_kl_coefficient_cannot_be_moved_below_zero_in_one_step(tmp_path: Path) -> None:
    flags = ["--kl-coef", "0.1", "--kl-target", "0.01", "--rollout-batch-size", "100", "--n-samples-per-prompt", "5"]
    make_config(tmp_path, *flags, "--kl-horizon", "101")
    with pytest.raises(ValueError, match=r"--kl-horizon must be > a fifth of a step's samples \(100\), got 100"):
        make_config(tmp_path, *flags, "--kl-horizon", "100")


def test_spread_filter_needs_a_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--dynamic-filter-path nonzero_std needs --n-samples-per-prompt > 1.*got 1"):
        flags = ["--n-samples-per-prompt", "1", "--dynamic-filter-path", "nonzero_std"]
        make_config(tmp_path, *flags, "--advantage-estimator", "reinforce")


def test_wsd_needs_a_decay_that_fits_the_schedule(tmp_path: Path) -> None:
    run = ["--lr-decay-style", "WSD", "--num-steps", "10", "--lr-warmup-updates", "4"]
    make_config(tmp_path, *run, "--lr-wsd-decay-updates", "6")
    with pytest.raises(ValueError, match="--lr-decay-style needs --lr-wsd-decay-updates"):
        make_config(tmp_path, *run)
    with pytest.raises(ValueError, match=r"--lr-wsd-decay-updates must be at most the 6 updates .* got 7"):
        make_config(tmp_path, *run, "--lr-wsd-decay-updates", "7")
    with pytest.raises(ValueError, match="--lr-wsd-decay-updates needs --lr-decay-style WSD"):
        make_config(tmp_path, "--lr-wsd-decay-updates", "6")


def test_a_policy_that_never_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--critic-warmup-steps must be < --num-steps 5, or the policy never trains"):
        make_config(tmp_path, "--advantage-estimator", "gae", "--num-steps", "5", "--critic-warmup-steps", "5")


def test_warmup_must_end_before_the_schedule_does(tmp_path: Path) -> None:
    message = r"--lr-warmup-updates must be < the 10 updates of the schedule, got 10"
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, "--lr-warmup-updates", "10", "--lr-decay-updates", "10")
    run = ["--lr-decay-style", "cosine", "--num-steps", "5", "--num-epochs-per-rollout", "2"]
    make_config(tmp_path, *run, "--lr-warmup-updates", "9")
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, *run, "--lr-warmup-updates", "10")
    ppo = ["--advantage-estimator", "gae", "--critic-warmup-steps", "2"]
    make_config(tmp_path, *run, *ppo, "--critic-lr-warmup-updates", "9", "--lr-warmup-updates", "5")
    with pytest.raises(ValueError, match=r"--critic-lr-warmup-updates must be < the 10 updates"):
        make_config(tmp_path, *run, *ppo, "--critic-lr-warmup-updates", "10")
    with pytest.raises(ValueError, match=r"--lr-warmup-updates must be < the 6 updates"):  # the policy waits two steps
        make_config(tmp_path, *run, *ppo, "--lr-warmup-updates", "6")


def test_workers_of_a_critic_apart_are_checked_as_the_policys(tmp_path: Path) -> None:
    ppo = ["--advantage-estimator", "gae", "--critic-num-workers", "4"]
    config = make_config(
        tmp_path, *ppo, "--critic-context-parallel-size", "2", "--tp-size", "2", "--train-num-workers", "2"
    )
    assert (config.data_parallel_size, config.critic_data_parallel_size, config.num_train_processes) == (1, 1, 6)
    assert config.critic_parallel.sequence_parallel and not config.parallel.sequence_parallel
    with pytest.raises(ValueError, match=r"--critic-num-workers must be a multiple of .* = 3, got 4"):
        make_config(tmp_path, *ppo, "--critic-pipeline-model-parallel-size", "3")
    with pytest.raises(
        ValueError, match=r"--critic-num-workers makes 4 data-parallel workers, more than the 2 samples"
    ):
        make_config(tmp_path, *ppo, "--rollout-batch-size", "2", "--n-samples-per-prompt", "1")
    with pytest.raises(ValueError, match=r"--critic-tensor-model-parallel-size needs --critic-num-workers.*got 2"):
        make_config(tmp_path, "--advantage-estimator", "gae", "--critic-tensor-model-parallel-size", "2")


def test_evaluation_sets_have_names_of_their_own(tmp_path: Path) -> None:
    path = str(write_prompts(tmp_path / "eval.jsonl"))
    with pytest.raises(ValueError, match="--eval-prompt-data must give every set its own name"):
        make_config(tmp_path, "--eval-prompt-data", "math", path, "math", path)
    with pytest.raises(ValueError, match="--eval-prompt-data takes names without '/'"):
        make_config(tmp_path, "--eval-prompt-data", "a/b", path)


@pytest.mark.parametrize("flag", ["--load", "--save-hf", "--reward-function-path", "--trackers"])
def test_an_empty_word_is_not_taken_for_the_default(tmp_path: Path, flag: str) -> None:
    """As `--load "$CHECKPOINT"` gives it where the variable has no value."""
    with pytest.raises(ValueError, match=f"{flag}.* must not be empty"):
        make_config(tmp_path, flag, "")


def test_training_without_prompts_names_the_flag(tmp_path: Path) -> None:
    from factories import write_model_folder

    from slime_rl.config import parse_config

    model = write_model_folder(tmp_path / "model")
    with pytest.raises(ValueError, match="--prompt-data is needed unless --num-steps is 0"):
        parse_config(["--hf-checkpoint", str(model)])


def test_derived_sizes_follow_from_the_flags(tmp_path: Path) -> None:
    flags = ["--rollout-batch-size", "6", "--n-samples-per-prompt", "4", "--num-updates-per-rollout", "3"]
    config = make_config(tmp_path, *flags, "--global-batch-size", "8")
    assert config.train.samples_per_rollout == 24
    assert config.train.samples_per_update == 8
    assert config.data_parallel_size == 1


def test_engines_are_needed_for_rollouts_and_evaluation_only(tmp_path: Path) -> None:
    sft = ["--loss", "sft", "--n-samples-per-prompt", "1"]
    path = str(write_prompts(tmp_path / "eval.jsonl"))
    assert make_config(tmp_path).needs_engines
    assert not make_config(tmp_path, *sft).needs_engines
    assert make_config(tmp_path, *sft, "--eval-prompt-data", "math", path).needs_engines


def test_folders_follow_from_the_run_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert config.checkpoint_dir == tmp_path / "run" / "checkpoints"
    assert make_config(tmp_path, "--save", "elsewhere").checkpoint_dir == Path("elsewhere")


def test_slice_of_a_prompt_file_is_checked_by_its_file(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "part.jsonl")
    assert make_config(tmp_path, "--prompt-data", f"{path}@[0:2]").data.prompt_data == f"{path}@[0:2]"


def test_counts_of_nodes_and_gpus_give_those_of_workers_and_engines(tmp_path: Path) -> None:
    nodes = ("--num-nodes", "2", "--num-workers-per-node", "4", "--rollout-batch-size", "8")
    assert make_config(tmp_path, *nodes).cluster.train_num_workers == 8
    gpus = make_config(tmp_path, "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4").cluster
    assert gpus.rollout_num_engines == 2
    urls = ("--rollout-external-engine-addrs", "http://a:1", "http://b:1")
    assert make_config(tmp_path, *urls).cluster.rollout_num_engines == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-nodes", "2"), "--num-nodes goes together with --num-workers-per-node, got 2"),
        (
            ("--num-nodes", "2", "--num-workers-per-node", "4", "--train-num-workers", "4"),
            "--train-num-workers must be --num-nodes x --num-workers-per-node = 8, or left out, got 4",
        ),
        (
            ("--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"),
            "--rollout-num-gpus must be --rollout-num-engines x --rollout-num-gpus-per-engine = 2, got 3",
        ),
        (
            ("--rollout-num-gpus-per-engine", "6", "--rollout-num-gpus-per-node", "4"),
            "--rollout-num-gpus-per-engine must be at most --rollout-num-gpus-per-node (4) or a multiple of it, got 6",
        ),
        (
            ("--rollout-num-gpus-per-engine", "8", "--num-gpus-per-node", "4"),
            "--weight-sync must not be tensor where an engine spans 2 nodes (--rollout-num-gpus-per-node): they share",
        ),
        (
            ("--rollout-external-engine-addrs", "http://a:1", "--rollout-num-gpus", "4"),
            "--rollout-num-gpus cannot be used with --rollout-external-engine-addrs",
        ),
        (("--rollout-external-engine-addrs", "a:1"), "takes URLs such as http://host:30000, got 'a:1'"),
        (
            ("--rollout-external-engine-addrs", "http://a:1", "--rollout-num-engines", "2"),
            "--rollout-num-engines must be the number of --rollout-external-engine-addrs (1), or left out, got 2",
        ),
        (
            ("--colocate", "--rollout-num-engines", "2"),
            "--rollout-num-engines engines of 1 GPUs, 2 together, do not fit on the 1 of the train workers "
            "(--colocate), got 2",
        ),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_config(tmp_path, *flags)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"--engine-api-key-file .*key: cannot be read as text: .*0xff"):
        make_config(tmp_path, "--engine-api-key-file", str(tmp_path / "key"))


@pytest.mark.parametrize("flag", ["--load", "--load-rollouts", "--ref-load", "--engine-api-key-file"])
def test_a_path_that_no_file_can_have_is_named_with_its_flag(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} cannot be read: File name too long: xxx"):
        make_config(tmp_path, flag, "x" * 300)
