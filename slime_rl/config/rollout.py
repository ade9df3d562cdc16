from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_rl.config.checks import check, check_data_files, check_file, check_not_negative, check_positive
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling: how responses are drawn during training."""

    rollout_temperature: float = 1.0
    """Sampling temperature; must be > 0. The trainer divides its logits by it too."""

    rollout_top_p: float = 1.0
    """Nucleus sampling. Below 1 the engine's log-probs are those of the full distribution."""

    rollout_top_k: int = -1
    """Sample among the k likeliest tokens; -1 is all."""

    max_prompt_len: int = flag(2048, aliases=("--rollout-max-prompt-len",))
    """Most tokens in a prompt; what happens to a longer one is --long-prompt."""

    max_response_len: int = flag(1024, aliases=("--rollout-max-response-len",))
    """Most tokens in a response."""

    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""

    def __post_init__(self) -> None:
        check_positive(
            rollout_temperature=self.rollout_temperature,
            max_prompt_len=self.max_prompt_len,
            max_response_len=self.max_response_len,
        )
        check(0 < self.rollout_top_p <= 1, "--rollout-top-p", "must be in (0, 1]", self.rollout_top_p)
        top_k = self.rollout_top_k
        check(top_k == -1 or top_k > 0, "--rollout-top-k", "must be -1 or > 0", top_k)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: prompts and how a row is read."""

    prompt_data: str | None = None
    """Training prompts: jsonl, json, yaml, parquet, csv or arrow files, globs, or a Hugging Face datasets folder, comma
    separated. A slice is FILE@[0:1000], a weight (how often an epoch sees each row) FILE@2 or FILE@[0:1000]@0.5."""

    data_source_path: str = "file"
    """Where prompts come from: file, or package.module:Class."""

    input_key: str = "prompt"
    """Field with the prompt: text, or chat messages."""

    label_key: str | None = "label"
    """Field with the expected answer; rows without it are an error. 'none' for prompts without labels."""

    metadata_key: str = "metadata"
    """Field with a dictionary that rewards and generate functions may read."""

    apply_chat_template: bool = True
    """Render the prompt with the tokenizer's chat template; text becomes one user message."""

    shuffle: bool = flag(True, aliases=("--rollout-shuffle",))
    """Shuffle every epoch anew, by seed and epoch."""

    bad_rows: Literal["error", "skip"] = "error"
    """A row that cannot be read ends the run (error) or is left out and counted (skip)."""

    long_prompt: Literal["error", "skip"] = "error"
    """The same for a prompt over --max-prompt-len."""

    check_rows: int = 100_000
    """Rows of --prompt-data that are read and checked before the run starts, later ones when they are drawn; 0 checks
    all of them. Where all are bad or too long, and skipped, up to 100,000 more are looked at for one that is not."""

    curriculum_path: str | None = None
    """Which rows an epoch has, and in which order, as package.module:name."""

    def __post_init__(self) -> None:
        check_not_negative(check_rows=self.check_rows)

    @property
    def label_field(self) -> str | None:
        return None if self.label_key in (None, "none") else self.label_key


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout: how groups are produced."""

    rollout_ahead: int = 0
    """Steps that generation runs ahead of training: 0 is synchronous, 1 is one step off."""

    rollout_function_path: str = "auto"
    """How a step's groups are produced: group_loop, sft, dumped, or package.module:name; auto is dumped with
    --load-rollouts, sft with --loss sft, else group_loop."""

    generate_function_path: str = flag("single_turn", aliases=("--custom-generate-function-path",))
    """How one sample is generated: single_turn, agent_loop (several turns with tools), environment_loop (with
    --environment-path), gateway (by the agent of --agent-path), or package.module:name."""

    rollout_concurrency: int = flag(256, aliases=("--sglang-server-concurrency",))
    """Requests in flight to each engine."""

    request_timeout_s: float = 600.0
    """Longest time for one generation request, retries included."""

    group_timeout_s: float = 3600.0
    """Longest time for one group, generation and reward of all its samples together; whatever hangs in it is an error
    then (see --rollout-error)."""

    rollout_error: Literal["stop", "drop"] = "stop"
    """When generate or reward raises: stop the run with that traceback, or drop the group and count it."""

    dump_rollouts: str | None = flag(None, aliases=("--save-debug-rollout-data",))
    """Folder that every step's groups are written to, with tokens, log-probs, versions and rewards."""

    load_rollouts: str | None = flag(None, aliases=("--load-debug-rollout-data",))
    """Train on the steps that --dump-rollouts wrote to this folder; no prompt is read and no engine started."""

    weight_update_mode: Literal["retract", "in_place"] = "retract"
    """Requests in flight during a weight update: retract recomputes their KV cache with the new weights, in_place
    keeps it."""

    def __post_init__(self) -> None:
        check_not_negative(rollout_ahead=self.rollout_ahead)
        load, function = self.load_rollouts, self.rollout_function_path
        if load is not None:
            check(Path(load).is_dir(), "--load-rollouts", "must be a folder that exists", load)
            check(
                function in ("auto", "dumped"), "--rollout-function-path", "must be auto with --load-rollouts", function
            )
            dump = self.dump_rollouts
            is_same = dump is not None and Path(dump).resolve() == Path(load).resolve()
            check(not is_same, "--dump-rollouts", "must be another folder than --load-rollouts", load)
        else:
            check(function != "dumped", "--rollout-function-path", "needs --load-rollouts to be dumped", function)
        check_positive(
            rollout_concurrency=self.rollout_concurrency,
            request_timeout_s=self.request_timeout_s,
            group_timeout_s=self.group_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Buffer: the ledger between rollout and training."""

    buffer_path: str = "ledger"
    """The buffer itself: ledger, or package.module:Class."""

    buffer_filter_path: str = "stalest_first"
    """Which generated groups train next: stalest_first (oldest weights, then drawn first), oldest_first,
    freshest_first, by_reward_variance, or package.module:name."""

    dynamic_filter_path: str | None = flag(None, aliases=("--dynamic-sampling-filter-path",))
    """Which complete groups may train at all: nonzero_std, reward_band, not_all_truncated, or package.module:name."""

    sample_filter_path: str | None = flag(None, aliases=("--rollout-sample-filter-path",))
    """Which samples of a kept group train: completed (not the truncated ones), distinct (each response once), or
    package.module:name. Advantages and the loss see only those that are left."""

    reward_band: tuple[float, ...] = (0.0, 1.0)
    """LOW HIGH: reward_band keeps groups whose mean reward lies strictly between them."""

    buffer_max_age: int | None = None
    """Oldest weight version of a group that may train, counted back from the step: what becomes of surplus and partial
    groups over it is --over-age. No bound when not given; with --fully-async it is --max-staleness."""

    replay_groups: int = 0
    """Groups of each step that have trained before: those with the largest spread of rewards. 0 is off. Their tokens
    are older than the step, so choose an --off-policy-correction or --old-log-probs rollout."""

    replay_pool_groups: int = 256
    """Trained groups that are kept for --replay-groups."""

    replay_max_uses: int = 1
    """Times that a group is replayed at most."""

    replay_max_age: int | None = None
    """Oldest weight version of a replayed group, counted back from the step; no bound when not given."""

    buffer_memory_bytes: int | None = None
    """Host memory for the tokens of buffered groups; what is over it is moved to --buffer-spill-dir. No bound when not
    given."""

    buffer_spill_dir: str | None = None
    """Folder for groups over --buffer-memory-bytes and for offloaded ones; RUN_DIR/buffer_spill when not given."""

    offload_buffer: bool = False
    """Move waiting groups to --buffer-spill-dir while the trainer works, so that it can have their host memory."""

    over_sampling_batch_size: int | None = None
    """Groups that a step has finished or running at once, so that a filter may drop some and the slowest are not waited
    for; what is too much goes back. --rollout-batch-size when not given."""

    max_sampling_rounds: int = 20
    """Groups that may be begun for one step, in multiples of --rollout-batch-size (or --over-sampling-batch-size, where
    that is more), before the run stops because the filter drops nearly all."""

    def __post_init__(self) -> None:
        check_positive(
            over_sampling_batch_size=self.over_sampling_batch_size,
            max_sampling_rounds=self.max_sampling_rounds,
            replay_pool_groups=self.replay_pool_groups,
            replay_max_uses=self.replay_max_uses,
            replay_max_age=self.replay_max_age,
            buffer_memory_bytes=self.buffer_memory_bytes,
        )
        check_not_negative(replay_groups=self.replay_groups, buffer_max_age=self.buffer_max_age)
        in_order = len(self.reward_band) == 2 and self.reward_band[0] < self.reward_band[1]
        check(in_order, "--reward-band", "must be two rising numbers", self.reward_band)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward: how responses are scored."""

    rm_type: str = "math"
    """Built-in reward: math, exact, numeric, multiple_choice, f1, regex_format, code, json_schema, remote,
    reward_model, judge, mixture, or episode (of an environment or an agent)."""

    reward_function_path: str | None = flag(None, aliases=("--custom-rm-path",))
    """Own reward as package.module:name; takes the place of --rm-type."""

    reward_timeout_s: float = 10.0
    """Longest time for scoring one response; then it counts 0 and rewards/timeouts goes up."""

    reward_num_workers: int = 1
    """Processes that score responses; each can be killed without harm to the run."""

    reward_url: str | None = None
    """Service that scores: for remote and reward_model its address, for judge the base of an OpenAI-compatible API, for
    both models also sglang:NAME, a model of --sglang-config; a judge without it is the policy itself."""

    reward_request_timeout_s: float = 120.0
    """Longest time for one answer of --reward-url, retries included."""

    reward_batch_size: int = 64
    """Most samples in one request of --rm-type remote."""

    reward_mixture: tuple[str, ...] = ()
    """NAME=WEIGHT ...: rewards of --rm-type mixture for rows without metadata["rewards"]."""

    judge_prompt: str | None = None
    """File with the rubric of --rm-type judge; it holds {response} and may hold {prompt} and {label}."""

    judge_model: str = "judge"
    """Name of the model that --reward-url is asked for by --rm-type judge."""

    judge_max_tokens: int = 256
    """Most tokens of a judge's verdict."""

    def __post_init__(self) -> None:
        check_positive(
            reward_timeout_s=self.reward_timeout_s,
            reward_num_workers=self.reward_num_workers,
            reward_request_timeout_s=self.reward_request_timeout_s,
            reward_batch_size=self.reward_batch_size,
            judge_max_tokens=self.judge_max_tokens,
        )
        if self.judge_prompt is not None:
            check_file("--judge-prompt", self.judge_prompt)
        needs_url = self.rm_type in ("remote", "reward_model") and self.reward_function_path is None
        check(
            not needs_url or self.reward_url is not None, "--reward-url", f"is needed by --rm-type {self.rm_type}", None
        )
        url = self.reward_url
        is_address = url is None or url.startswith(("http://", "https://", "sglang:"))
        check(is_address, "--reward-url", "must begin with http://, https:// or sglang:", url)
        self.mixture_weights  # noqa: B018 - checks it

    @property
    def mixture_weights(self) -> tuple[tuple[str, float], ...]:
        """(name, weight) of every entry of --reward-mixture."""
        pairs = []
        for entry in self.reward_mixture:
            name, equals, weight = entry.rpartition("=")
            try:
                pairs.append((name, float(weight)))
            except ValueError:
                equals = ""
            check(bool(equals) and bool(name), "--reward-mixture", "takes NAME=WEIGHT", entry)
            check(math.isfinite(pairs[-1][1]), "--reward-mixture", "takes finite weights", entry)
        twice = [name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1]
        check(not twice, "--reward-mixture", "takes each reward once", twice[:1])
        return tuple(pairs)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation: held-out prompts."""

    eval_prompt_data: tuple[str, ...] = ()
    """Pairs NAME FILE [NAME FILE ...]: held-out prompts."""

    eval_interval: int | None = None
    """Steps between evaluations; there is one before the first step too. When not given, only before and after the
    run."""

    eval_n_samples_per_prompt: int = flag(1, aliases=("--n-samples-per-eval-prompt",))
    """Samples per held-out prompt."""

    eval_temperature: float = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""

    eval_top_p: float = 1.0
    """Nucleus sampling of evaluation."""

    eval_top_k: int = -1
    """Evaluation samples among the k likeliest tokens; -1 is all."""

    eval_override: tuple[str, ...] = ()
    """Settings of single sets as NAME:FLAG=VALUE, e.g. aime:eval-n-samples-per-prompt=16 aime:eval-temperature=0.6
    aime:rm-type=math. FLAG is an --eval-* sampling flag, or --rm-type, --reward-function-path,
    --generate-function-path, --input-key, --label-key, --metadata-key."""

    eval_max_response_len: int | None = None
    """Most tokens in an evaluation response; --max-response-len when not given."""

    def __post_init__(self) -> None:
        check(len(self.eval_prompt_data) % 2 == 0, "--eval-prompt-data", "takes pairs NAME FILE", self.eval_prompt_data)
        for _, path in self.datasets:
            check_data_files("--eval-prompt-data", path)
        names = [name for name, _ in self.datasets]
        check(len(set(names)) == len(names), "--eval-prompt-data", "must give every set its own name", names)
        check(all(names), "--eval-prompt-data", "must give every set a name", names)
        check(not any("/" in name for name in names), "--eval-prompt-data", "takes names without '/'", names)
        check(
            self.eval_interval is None or bool(names), "--eval-interval", "needs --eval-prompt-data", self.eval_interval
        )
        check_positive(
            eval_interval=self.eval_interval,
            eval_n_samples_per_prompt=self.eval_n_samples_per_prompt,
            eval_max_response_len=self.eval_max_response_len,
        )
        top_k = self.eval_top_k
        check(top_k == -1 or top_k > 0, "--eval-top-k", "must be -1 or > 0", top_k)
        check_not_negative(eval_temperature=self.eval_temperature)
        check(0 < self.eval_top_p <= 1, "--eval-top-p", "must be in (0, 1]", self.eval_top_p)
        check(math.isfinite(self.eval_temperature), "--eval-temperature", "must be finite", self.eval_temperature)

    @property
    def datasets(self) -> list[tuple[str, str]]:
        """(name, file) of every evaluation set."""
        return list(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))
