"""The whole configuration: one frozen tree, built once from the command line and never changed.

argv ──► expand_config_files ──► split_passthrough ──► StrictParser ──► one dataclass per concern ──► Config
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slime_rl.config.agent import AgentConfig
from slime_rl.config.algorithm import GROUP_ESTIMATORS, AlgorithmConfig
from slime_rl.config.asynchrony import AsynchronyConfig
from slime_rl.config.checks import check, check_data_files
from slime_rl.config.cluster import ClusterConfig, ParallelConfig, check_engine_size, derived_counts
from slime_rl.config.critic import CriticConfig
from slime_rl.config.evaluation import check_override_names, for_evaluation
from slime_rl.config.flags import StrictParser, add_dataclass, build, split_passthrough
from slime_rl.config.model import ModelConfig
from slime_rl.config.rollout import BufferConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, SamplingConfig
from slime_rl.config.run import CheckpointConfig, LoggingConfig
from slime_rl.config.served_models import FLAG, POLICY, SCHEME, ServedModel, ServerGroup, read_served_models
from slime_rl.config.serving import EngineConfig, RouterConfig, WeightSyncConfig
from slime_rl.config.training import OptimizerConfig, TrainConfig
from slime_rl.config.yaml_file import expand_config_files

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run can be told."""

    model: ModelConfig
    train: TrainConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    critic: CriticConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    data: DataConfig
    sampling: SamplingConfig
    rollout: RolloutConfig
    asynchrony: AsynchronyConfig
    buffer: BufferConfig
    reward: RewardConfig
    agent: AgentConfig
    evaluation: EvalConfig
    engine: EngineConfig
    router: RouterConfig
    weight_sync: WeightSyncConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        self._check_workers("--train-num-workers", self.cluster.train_num_workers, self.parallel)
        if self.critic_is_apart:
            self._check_workers("--critic-num-workers", self.critic.critic_num_workers, self.critic_parallel)
        check(
            not self.cluster.colocate or self.weight_sync.weight_sync in ("tensor", "disk"),
            "--weight-sync",
            "must be tensor or disk with --colocate: NCCL needs a GPU for each rank, and engines that gave their "
            "weights back cannot take a delta",
            self.weight_sync.weight_sync,
        )
        self._check_data()
        self._check_algorithm()
        self._check_schedules()
        self._check_asynchrony()
        self._check_reward()
        self._check_served_models()
        for name, _ in self.evaluation.datasets:
            for_evaluation(self, name)  # raises where an override is wrong
        check_override_names(self)

    def _check_workers(self, flag: str, workers: int, parallel: ParallelConfig) -> None:
        """Workers of a train group, its parallel sizes and the samples of an update fit together."""
        shards, samples = parallel.model_parallel_size, self.train.samples_per_update
        check(
            workers % shards == 0,
            flag,
            f"must be a multiple of tensor x pipeline x context parallel size = {shards}",
            workers,
        )
        check(
            samples >= workers // shards,
            flag,
            f"makes {workers // shards} data-parallel workers, more than the {samples} samples of one update "
            "(--rollout-batch-size x --n-samples-per-prompt / --num-updates-per-rollout)",
            workers,
        )

    def _check_schedules(self) -> None:
        """A rate must not rise for longer than its schedule spans."""
        ours, critic = self.optimizer, self.critic
        for flag, warmup, style, waiting in (
            ("--lr-warmup-updates", ours.lr_warmup_updates, ours.lr_decay_style, critic.critic_warmup_steps),
            ("--critic-lr-warmup-updates", critic.critic_lr_warmup_updates, critic.critic_lr_decay_style, 0),
        ):
            if ours.lr_decay_updates is None and (style or ours.lr_decay_style) == "constant":
                continue  # no end to fall short of
            span = ours.lr_decay_updates or max(1, self.num_updates(waiting))
            check(warmup < span, flag, f"must be < the {span} updates of the schedule", warmup)
            decay = ours.lr_wsd_decay_updates
            if (style or ours.lr_decay_style) == "WSD":
                check(decay is not None, "--lr-decay-style", "needs --lr-wsd-decay-updates", "WSD")
                wanted = f"must be at most the {span - warmup} updates of the schedule after its warm-up"
                check((decay or 0) <= span - warmup, "--lr-wsd-decay-updates", wanted, decay)
        styles = (ours.lr_decay_style, critic.critic_lr_decay_style)
        if "WSD" not in styles:
            wanted = "needs --lr-decay-style WSD"
            check(ours.lr_wsd_decay_updates is None, "--lr-wsd-decay-updates", wanted, ours.lr_wsd_decay_updates)
        if self.needs_critic and self.train.num_steps > 0:
            wanted = f"must be < --num-steps {self.train.num_steps}, or the policy never trains"
            steps = critic.critic_warmup_steps
            check(steps < self.train.num_steps, "--critic-warmup-steps", wanted, steps)

    def _check_data(self) -> None:
        if self.needs_prompt_data:
            check(self.data.prompt_data is not None, "--prompt-data", "is needed unless --num-steps is 0", None)
        if self.data.prompt_data is not None and self.data.data_source_path == "file":
            check_data_files("--prompt-data", self.data.prompt_data)
        if self.train.loss == "sft" and self.train.num_steps > 0:
            check(self.data.label_field is not None, "--label-key", "is needed with --loss sft", self.data.label_key)
        has_evaluation = bool(self.evaluation.datasets)
        check(self.train.num_steps > 0 or has_evaluation, "--num-steps", "may be 0 only with --eval-prompt-data", 0)
        if self.train.stop_at_eval_accuracy is not None:
            check(has_evaluation, "--stop-at-eval-accuracy", "needs --eval-prompt-data", None)

    def _check_algorithm(self) -> None:
        if not self.needs_critic:
            self.critic.check_unused()
        kl_coef = self.algorithm.kl_coef
        check(kl_coef == 0 or self.train.loss == "policy", "--kl-coef", "needs rewards: --loss policy", kl_coef)
        if self.algorithm.kl_target is not None:  # else one step could take the coefficient below 0
            least, horizon = self.train.samples_per_rollout / 5, self.algorithm.kl_horizon
            check(horizon > least, "--kl-horizon", f"must be > a fifth of a step's samples ({least:g})", horizon)
        self._check_teacher_and_reference()
        uses_advantages = self.train.loss != "sft" and (
            self.algorithm.policy_loss != "distillation" or self.algorithm.distillation_reward_coef > 0
        )
        if uses_advantages and self.algorithm.advantage_estimator in GROUP_ESTIMATORS:
            check(
                self.train.n_samples_per_prompt > 1,
                "--n-samples-per-prompt",
                f"must be > 1 with --advantage-estimator {self.algorithm.advantage_estimator}, which compares the "
                "samples of a prompt: every advantage would be 0",
                self.train.n_samples_per_prompt,
            )
        needs_spread = self.train.n_samples_per_prompt == 1 and self.buffer.dynamic_filter_path == "nonzero_std"
        check(
            not needs_spread,
            "--dynamic-filter-path",
            "nonzero_std needs --n-samples-per-prompt > 1: a single sample has no spread",
            self.train.n_samples_per_prompt,
        )
        replay, batch_size = self.buffer.replay_groups, self.train.rollout_batch_size
        check(replay < batch_size, "--replay-groups", f"must be < --rollout-batch-size ({batch_size})", replay)
        fully_async = self.asynchrony.fully_async
        check(not (replay and fully_async), "--replay-groups", "does not go together with --fully-async", replay)
        if self.algorithm.overlong_buffer_len is not None:
            check(
                self.algorithm.overlong_buffer_len <= self.sampling.max_response_len,
                "--overlong-buffer-len",
                f"must be <= --max-response-len ({self.sampling.max_response_len})",
                self.algorithm.overlong_buffer_len,
            )

    def _check_teacher_and_reference(self) -> None:
        loss, teacher = self.algorithm.policy_loss, self.model.teacher_load
        if loss == "distillation":
            check(teacher is not None, "--policy-loss", "needs --teacher-load", loss)
        elif ":" not in loss:  # a loss of one's own may read the teacher, too
            check(teacher is None, "--teacher-load", f"needs --policy-loss distillation (it is {loss})", teacher)
        interval = self.model.ref_update_interval
        if interval is not None:
            needed = "needs a reference: --use-kl-loss or --kl-coef > 0"
            check(self.algorithm.needs_reference, "--ref-update-interval", needed, interval)

    def _check_asynchrony(self) -> None:
        options, samples = self.asynchrony, self.train.n_samples_per_prompt
        minimum = options.min_samples_per_group
        if minimum is not None:
            check(
                minimum <= samples, "--min-samples-per-group", f"must be <= --n-samples-per-prompt ({samples})", minimum
            )
        wanted = "needs --partial-rollout: without it interrupted samples start again"
        masks = options.mask_offpolicy_in_partial_rollout
        check(options.partial_rollout or not masks, "--mask-offpolicy-in-partial-rollout", wanted, masks)
        deadline, limit = options.sample_deadline_s, self.rollout.group_timeout_s
        wanted = f"must be < --group-timeout-s ({limit:g}), which ends the run or drops the group"
        check(deadline is None or deadline < limit, "--sample-deadline-s", wanted, deadline)
        max_age, ahead = self.buffer.buffer_max_age, self.rollout.rollout_ahead
        if max_age is not None:
            check(not options.fully_async, "--buffer-max-age", "is --max-staleness with --fully-async", max_age)
            check(max_age >= ahead, "--buffer-max-age", f"must be >= --rollout-ahead ({ahead})", max_age)
        if self.train.deterministic:
            depends_on_time = {
                "--rollout-ahead": self.rollout.rollout_ahead or None,
                "--max-staleness": (options.max_staleness or None) if options.fully_async else None,
                "--sample-deadline-s": options.sample_deadline_s,
                "--over-sampling-batch-size": self.buffer.over_sampling_batch_size,
            }
            for name, value in depends_on_time.items():
                check(value is None, name, "makes results depend on time, which --deterministic excludes", value)
        if options.fully_async:
            ahead, function = self.rollout.rollout_ahead, self.rollout.rollout_function_path
            check(ahead == 0, "--rollout-ahead", "must be 0 with --fully-async", ahead)
            check(self.train.loss == "policy", "--fully-async", "needs --loss policy", self.train.loss)
            check(
                function in ("auto", "group_loop"),
                "--rollout-function-path",
                "works step by step, so it cannot be chosen with --fully-async",
                function,
            )

    def _check_reward(self) -> None:
        reward, function = self.reward, self.rollout.generate_function_path
        scores = reward.reward_function_path is None and (self.train.loss != "sft" or bool(self.evaluation.datasets))
        check(
            not scores or reward.rm_type != "episode" or function not in ("single_turn", "agent_loop"),
            "--rm-type",
            f"cannot be episode with --generate-function-path {function}: environment_loop, gateway and own functions "
            "set the reward of an episode",
            reward.rm_type,
        )

    def _check_served_models(self) -> None:
        models, url = self.served_models, self.reward.reward_url or ""
        if self.engine.sglang_config is not None:
            external = self.cluster.rollout_external_engine_addrs
            check(not external, FLAG, "cannot be used with --rollout-external-engine-addrs", self.engine.sglang_config)
            policy, path, file = models[0], self.model.hf_checkpoint, f"{FLAG} {self.engine.sglang_config}"
            count, each = self.cluster.rollout_num_engines, self.cluster.rollout_num_gpus_per_engine
            wanted = f"must be {policy.num_engines} as in {file}, or left out"
            check(policy.num_engines == count, "--rollout-num-engines", wanted, count)
            for model in models:
                for size in model.sizes:
                    name = f"{file}: {model.name}: num_gpus_per_engine"
                    check_engine_size(name, size, self.cluster.rollout_num_gpus_per_node)
            wanted = f"must be {' or '.join(map(str, policy.sizes))} as in {file}, or left out"
            check(each in policy.sizes, "--rollout-num-gpus-per-engine", wanted, each)
            is_ours = policy.model_path is None or Path(policy.model_path).resolve() == Path(path).resolve()
            check(is_ours, f"{file}: {policy.name}: model_path", f"must be --hf-checkpoint ({path})", policy.model_path)
        self._check_sizes(models[0])
        if models[0].is_disaggregated:
            self._check_disaggregated()
        self._check_shared_router(models)
        if any(model.is_disaggregated for model in models):  # the last one of a kind would be taken out
            rule = f"cannot be used with prefill and decode engines ({FLAG})"
            check(self.engine.engine_slow_s is None, "--engine-slow-s", rule, self.engine.engine_slow_s)
        if url.startswith(SCHEME):
            names = [model.name for model in models if not model.is_policy]
            rule = f"must name a model of {FLAG} that is not the policy ({', '.join(names) or 'there is none'})"
            check(url.removeprefix(SCHEME) in names, "--reward-url", rule, url)

    def _check_sizes(self, policy: ServedModel) -> None:
        """GPUs of the policy's engines, which may differ."""
        cluster, count = self.cluster, policy.num_engines
        each = " and ".join(map(str, policy.sizes))
        if cluster.rollout_num_gpus is not None:
            rule = "cannot be used with --rollout-external-engine-addrs: servers that run say their sizes themselves"
            check(not cluster.rollout_external_engine_addrs, "--rollout-num-gpus", rule, cluster.rollout_num_gpus)
            file = self.engine.sglang_config
            same = f"as in {FLAG} {file}" if file else "--rollout-num-engines x --rollout-num-gpus-per-engine"
            wanted = f"must be {same} = {policy.num_gpus}"
            check(cluster.rollout_num_gpus == policy.num_gpus, "--rollout-num-gpus", wanted, cluster.rollout_num_gpus)
        workers = cluster.train_num_workers
        wanted = (
            f"engines of {each} GPUs, {policy.num_gpus} together, do not fit on the {workers} of the train workers "
            "(--colocate)"
        )
        check(not cluster.colocate or policy.num_gpus <= workers, "--rollout-num-engines", wanted, count)
        nodes = max(self.for_engine(policy, group).cluster.nodes_per_engine for group in policy.groups)
        check(
            nodes == 1 or self.weight_sync.weight_sync != "tensor",
            "--weight-sync",
            f"must not be tensor where an engine spans {nodes} nodes (--rollout-num-gpus-per-node): "
            "they share no memory",
            self.weight_sync.weight_sync,
        )

    def _check_shared_router(self, models: tuple[ServedModel, ...]) -> None:
        if not self.router.share_router:
            rule = (
                "must not be power_of_two without --share-router: sglang-router starts with it only beside two engines"
            )
            policy = self.router.router_policy
            check(policy != "power_of_two", "--router-policy", rule, policy)
            return
        names = [model.name for model in models]
        check(len(names) > 1, "--share-router", f"needs a {FLAG} with more than one model", names)
        mixed = [model.name for model in models if model.is_disaggregated]
        check(not mixed, "--share-router", f"cannot be used with prefill and decode engines ({FLAG})", mixed)

    def _check_disaggregated(self) -> None:
        """Rules of a policy whose prompts and responses are computed by different engines."""
        what = f"with prefill and decode engines ({FLAG})"
        check(not self.cluster.colocate, "--colocate", f"cannot be used {what}: they give no memory back", True)
        ahead = self.steps_ahead or self.asynchrony.fully_async
        flag = "--fully-async" if self.asynchrony.fully_async else "--rollout-ahead"
        rule = f"cannot be used {what}: they do not tell which weights sampled the first token of a request in flight"
        check(not ahead, flag, rule, self.steps_ahead)

    @property
    def served_models(self) -> tuple[ServedModel, ...]:
        """What engines serve, the policy first. Reads --sglang-config: for the driver's machine only."""
        each = self.cluster.rollout_num_gpus_per_engine
        if self.engine.sglang_config is not None:
            return read_served_models(self.engine.sglang_config, each)
        group = ServerGroup(self.cluster.rollout_num_engines, each)
        return (ServedModel(POLICY, None, True, (group,)),)

    @property
    def num_gpus_beside(self) -> int:
        """GPUs of the engines of models beside the policy (on CPU: their places)."""
        return sum(model.num_gpus for model in self.served_models[1:])

    def for_engine(self, model: ServedModel, group: ServerGroup) -> Config:
        """As an engine of that group is to see it. --sglang-* flags are the policy's."""
        passed = self.engine.sglang_args if model.is_policy else ()
        changes: dict[str, tuple[Any, dict[str, Any]]] = {
            "model": (self.model, {"hf_checkpoint": model.model_path or self.model.hf_checkpoint}),
            "engine": (self.engine, {"sglang_args": (*passed, *group.all_arguments)}),
            "cluster": (self.cluster, {"rollout_num_gpus_per_engine": group.num_gpus_per_engine}),
        }
        return self.with_sections(
            **{name: _unchecked(type(section), vars(section) | new) for name, (section, new) in changes.items()}
        )

    def with_sections(self, **sections: Any) -> Config:
        """A copy with other sections, not checked again: the run's files may be on another machine."""
        return _unchecked(Config, vars(self) | sections)

    def num_updates(self, waiting_steps: int = 0) -> int:
        """Optimizer updates of the run after its first `waiting_steps`."""
        train = self.train
        return (train.num_steps - waiting_steps) * train.num_updates_per_rollout * train.num_epochs_per_rollout

    @property
    def steps_ahead(self) -> int:
        """Steps that generation may run ahead of training."""
        return self.asynchrony.max_staleness if self.asynchrony.fully_async else self.rollout.rollout_ahead

    @property
    def max_age(self) -> int | None:
        """Oldest weight version that may train, counted back from the step; None is no bound."""
        return self.asynchrony.max_staleness if self.asynchrony.fully_async else self.buffer.buffer_max_age

    @property
    def data_parallel_size(self) -> int:
        return self.cluster.train_num_workers // self.parallel.model_parallel_size

    @property
    def needs_critic(self) -> bool:
        return self.train.loss != "sft" and self.algorithm.advantage_estimator == "gae"

    @property
    def critic_is_apart(self) -> bool:
        """Whether the critic has a train group of its own."""
        return self.needs_critic and self.critic.critic_num_workers > 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """Parallel sizes of the critic, wherever it is."""
        return self.critic.parallel(self.parallel)

    @property
    def critic_data_parallel_size(self) -> int:
        workers = self.critic.critic_num_workers or self.cluster.train_num_workers
        return workers // self.critic_parallel.model_parallel_size

    @property
    def num_train_processes(self) -> int:
        """Megatron workers of every train group."""
        return self.cluster.train_num_workers + (self.critic.critic_num_workers if self.critic_is_apart else 0)

    @property
    def needs_engines(self) -> bool:
        """Supervised training and training on dumped rollouts need no engine unless there is an evaluation."""
        generates = self.train.loss != "sft" and self.rollout.load_rollouts is None
        return generates or bool(self.evaluation.datasets)

    @property
    def needs_prompt_data(self) -> bool:
        own_source = self.data.data_source_path != "file"
        return self.train.num_steps > 0 and not own_source and self.rollout.load_rollouts is None

    @property
    def run_dir(self) -> Path:
        return Path(self.logging.run_dir)

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.save) if self.checkpoint.save else self.run_dir / "checkpoints"


SECTIONS: dict[str, type] = typing.get_type_hints(Config)
PASSTHROUGH: dict[str, str] = {
    item.metadata["passthrough"]: item.name
    for section in SECTIONS.values()
    for item in dataclasses.fields(section)
    if item.metadata.get("passthrough")
}


def recorded_config(content: dict[str, dict[str, Any]]) -> Config:
    """The Config of a run from its config.json. Its values are not checked again: its files may have gone since.

    Raises:
        ValueError: fields are missing or unknown, as where another version of slime_rl wrote it.
    """
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        raise ValueError("it must hold an object of sections")
    known = {f"{name}.{f.name}" for name, section in SECTIONS.items() for f in dataclasses.fields(section)}
    if odd := sorted(known ^ {f"{name}.{field}" for name, section in content.items() for field in section}):
        raise ValueError(
            f"another version of slime_rl wrote it: {odd[0]} is {'missing' if odd[0] in known else 'unknown'}"
        )
    sections = {
        name: _unchecked(section, {key: _tuples(value) for key, value in content[name].items()})
        for name, section in SECTIONS.items()
    }
    return _unchecked(Config, sections)


def _unchecked(cls: type[T], values: dict[str, Any]) -> T:
    made = object.__new__(cls)
    vars(made).update(values)
    return made


def _tuples(value: Any) -> Any:
    """JSON has lists where the config has tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def own_flags() -> set[str]:
    """Every spelling of every flag of ours, with the --no- forms."""
    return make_parser().flags


def make_parser() -> StrictParser:
    """The parser with every flag, grouped by concern."""
    parser = StrictParser(
        prog="python -m slime_rl.train",
        allow_abbrev=False,
        description="Train a language model by reinforcement learning. SGLang arguments pass through as --sglang-NAME, "
        "sglang-router's as --router-NAME, fields of Megatron's configs as --megatron-NAME.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags as keys; the command line wins over it")
    for section in SECTIONS.values():
        add_dataclass(parser, section)
    return parser


def parse_config(argv: list[str] | None = None) -> Config:
    """The Config of a command line.

    Raises:
        ValueError: unknown flag, missing or bad value, or values that do not fit together.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _parse_config(words)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        path = str(error.filename)
        raise ValueError(f"{_flag_with(path, words)} cannot be read: {error.strerror}: {path}") from error


def _flag_with(path: str, words: list[str]) -> str:
    """The flag whose value `path` is or lies below; "a path" for one that comes from elsewhere."""
    flag = "a path"
    for word in words:
        flag, _, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        if value and path.startswith(value):
            return flag
    return "a path"


def _parse_config(argv: list[str]) -> Config:
    parser = make_parser()

    def check_words(words: list[str]) -> None:
        parser.check_alone(split_passthrough(words, list(PASSTHROUGH), parser.flags)[0])

    argv = expand_config_files(argv, check_words)
    rest, passed = split_passthrough(argv, list(PASSTHROUGH), parser.flags)
    values = vars(parser.parse_strictly(rest))
    values.update({PASSTHROUGH[prefix]: args for prefix, args in passed.items()})
    values |= derived_counts(values)
    sections = {name: build(section, values) for name, section in SECTIONS.items()}
    return Config(**sections)
