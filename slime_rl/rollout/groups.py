"""One group from prompt to score: tokenise, generate its samples together, reward them, filter.

Group (reserved) ──► prompt tokens ──► generate each sample ──► reward the group ──► filter ──► kept or a reason
                                              └── interrupted or late ──► without them, or UNFINISHED
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from slime_rl.buffer.filters import drop_reason, filter_samples
from slime_rl.buffer.policies import DYNAMIC_FILTERS, SAMPLE_FILTERS
from slime_rl.config import Config
from slime_rl.data.episodes import num_attempts
from slime_rl.data.rendering import render_prompt
from slime_rl.protocols import GenerateFunction, GroupFilter, RewardFunction, SampleFilter
from slime_rl.registry import own_code
from slime_rl.rollout.agent.episode import STATE_KEY
from slime_rl.rollout.agent.tools import row_tools
from slime_rl.rollout.generate import DROP_HINT, GENERATE_FUNCTIONS, keeps_episodes, seeded
from slime_rl.rollout.greedy import add_greedy_baseline
from slime_rl.rollout.rewards import REWARDS
from slime_rl.rollout.rewards.values import read_values
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import SampleScope, current_scope, use_scope
from slime_rl.types import Group, Sample, Status, all_finite

log = logging.getLogger(__name__)
UNFINISHED = "unfinished"  # verdict on a group that has samples to generate yet: back to the buffer
OnStart = Callable[[SampleScope], None]
CANCEL_GRACE_S = 10.0  # for what is cancelled to end
T = TypeVar("T")
FAILED = "failed_samples"  # reason for a group of which too few samples are left
NOTHING_TO_TRAIN = "nothing_to_train"  # reason for a group whose loss masks are 0 throughout


class Numbers(NamedTuple):
    """What a sample is known by."""

    group_index: int
    index: int
    rollout_id: int


class Begun(NamedTuple):
    """A sample whose generate function runs, and what it had before."""

    sample: Sample
    numbers: Numbers
    scope: SampleScope | None  # None where nothing was left to generate
    goes_on: bool  # it was interrupted before, and has tokens
    num_trained_tokens: int


@dataclasses.dataclass
class GroupRunner:
    """Runs groups with the functions that the flags name; loads and checks those functions when it is made."""

    config: Config
    reward_seconds: float = 0.0
    wasted_tokens: int = 0  # sampled for the loss, and never to be trained on

    def __post_init__(self) -> None:
        config = self.config
        self.generate: GenerateFunction = GENERATE_FUNCTIONS.load(config.rollout.generate_function_path)
        own = config.reward.reward_function_path
        rewards = REWARDS if own is None else dataclasses.replace(REWARDS, flag="--reward-function-path", builtins={})
        self.reward: RewardFunction = rewards.load(config.reward.rm_type if own is None else own)
        path = config.buffer.dynamic_filter_path
        self.filter: GroupFilter | None = DYNAMIC_FILTERS.load(path) if path else None
        path = config.buffer.sample_filter_path
        self.sample_filter: SampleFilter | None = SAMPLE_FILTERS.load(path) if path else None
        self._scopes: dict[int, list[SampleScope]] = {}  # of groups under way
        self._told: set[type[BaseException]] = set()

    async def run(
        self,
        group: Group,
        sampling_params: dict[str, Any],
        on_start: OnStart | None = None,
        wants_all: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Generate and score `group` in place; None keeps it, a string is the reason that it must be dropped for.

        UNFINISHED instead says that samples were interrupted or late and that the group cannot do without them; with
        `wants_all()`, asked when generation has ended, it never can. `on_start` hears of every sample that is
        generated, and may interrupt it later. An exception of user code propagates with --rollout-error stop and
        becomes a reason with drop.
        """
        group.attempts += 1
        try:
            verdict = await self.bounded(group, self._generate_and_score(group, sampling_params, on_start, wants_all))
            if self.config.rollout.rollout_error == "drop":
                from slime_rl.buffer.keepable import check_and_weigh  # imports torch, which the driver does without

                check_and_weigh(group)  # the buffer would refuse it, and that is no error that it can drop a group for
        except Exception as error:
            if self.config.rollout.rollout_error == "stop":
                raise
            self._tell(group, error)
            self.wasted_tokens += sum(s.num_trained_tokens for s in group.samples if isinstance(s.loss_mask, list))
            return f"error_{type(error).__name__}"
        if verdict is None:
            verdict = self._filter(group)
        if verdict not in (None, UNFINISHED):
            self.wasted_tokens += group.num_trained_tokens
        return verdict

    def _tell(self, group: Group, error: Exception) -> None:
        """Log what a group is dropped for, each kind of error once."""
        kind = type(error.__cause__ or error)
        if kind not in self._told:
            self._told.add(kind)
            log.warning("group %d is dropped (--rollout-error drop), as others may be: %s", group.group_index, error)

    async def _generate_and_score(
        self,
        group: Group,
        sampling_params: dict[str, Any],
        on_start: OnStart | None,
        wants_all: Callable[[], bool],
    ) -> str | None:
        await self.generate_samples(group, sampling_params, on_start)
        verdict = self._leave_out_unfinished(group, wants_all())
        if verdict is not None:
            return verdict
        await self.score(group.samples)
        verdict = self._leave_out_unfinished(group, wants_all())  # a reward may have given up on a sample
        if verdict is not None:
            return verdict
        if self.config.algorithm.advantage_estimator == "remax" and not await add_greedy_baseline(
            group, sampling_params, self._generate_one, self.score
        ):
            return UNFINISHED
        return None

    def _filter(self, group: Group) -> str | None:
        """None, or the reason for which the filters drop the group."""
        if group.num_trained_tokens == 0:
            return NOTHING_TO_TRAIN
        reason = None if self.filter is None else drop_reason(self.config, self.filter, group)
        if reason is None and self.sample_filter is not None:
            reason, tokens = filter_samples(self.config, self.sample_filter, group)
            self.wasted_tokens += tokens if reason is None else 0  # else `run` counts the whole group
            if reason is None and group.num_trained_tokens == 0:
                reason = NOTHING_TO_TRAIN
        return reason

    async def bounded(self, group: Group, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, unless it takes longer than --group-timeout-s.

        Raises:
            TimeoutError: it does, or it goes on when it is cancelled; names the flag and the group.
            ValueError: it was cancelled, but not by us.
        """
        limit_s = self.config.rollout.group_timeout_s
        task = asyncio.create_task(work)
        try:
            await self._wait(task, group, limit_s)
        except asyncio.CancelledError:
            await self._end(task, group)
            raise
        finally:
            self._scopes.pop(group.group_index, None)
        if task.cancelled():
            raise ValueError(f"{self._functions} raised CancelledError, for group {group.group_index}; {DROP_HINT}")
        if task.done():
            return task.result()
        finished = sum(sample.status.is_finished for sample in group.samples)
        await self._end(task, group)
        raise TimeoutError(
            f"group {group.group_index} was not generated and scored within --group-timeout-s {limit_s:g}: "
            f"{finished} of {len(group.samples)} samples are finished; a generate or reward function hangs, or the "
            "engines are too slow"
        )

    async def _wait(self, task: asyncio.Task[Any], group: Group, limit_s: float) -> None:
        """Until the task is done or has taken `limit_s`, not counting while all of its samples wait for a slot."""
        now, left = asyncio.get_running_loop().time, limit_s
        while not task.done() and left > 0:
            before = now()
            await asyncio.wait({task}, timeout=min(left, max(1.0, limit_s / 100)))
            running = [scope for scope in self._scopes.get(group.group_index, ()) if scope.is_running]
            if not running or not all(scope.queued for scope in running):
                left -= now() - before

    async def _end(self, task: asyncio.Task[Any], group: Group) -> None:
        """Cancel the task and see it end; one that takes no notice is left alone, and told of."""
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        if not task.done():
            raise TimeoutError(
                f"group {group.group_index} goes on though it was cancelled {CANCEL_GRACE_S:g} s ago; "
                f"{self._functions} must let asyncio.CancelledError pass"
            )
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what counts

    @property
    def _functions(self) -> str:
        """The flags of the user's functions, for messages."""
        return f"{self._generate_flag} or {reward_flag(self.config)}"

    async def generate_samples(
        self, group: Group, sampling_params: dict[str, Any], on_start: OnStart | None = None
    ) -> None:
        """Fill every sample that is not finished; a generate function may turn one into several of one episode.

        Samples that were interrupted come back as they are, or as ABORTED.
        """
        begun: list[Begun] = []
        scopes = self._scopes[group.group_index] = []
        prepare(self.config, group.samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in group.samples:
                    begun.append(self._begin(tasks, sample, sampling_params, on_start))
                    scopes += [] if begun[-1].scope is None else [begun[-1].scope]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one ended the others; it is the one to tell
        produced = [self._produced(one) for one in begun]
        _check_apart(self._generate_flag, begun, produced)
        group.samples = [made for one in produced for made in one]

    def _begin(
        self, tasks: asyncio.TaskGroup, sample: Sample, sampling_params: dict[str, Any], on_start: OnStart | None
    ) -> Begun:
        """Start the rest of a sample in a scope of its own; without one where nothing is left to do."""
        numbers = Numbers(sample.group_index, sample.index, sample.rollout_id)
        left = sampling_params["max_new_tokens"] - sample.response_length
        gave_up = sample.status is Status.FAILED  # before its group was interrupted
        if not sample.status.is_finished and not gave_up and left <= 0:
            sample.status = Status.TRUNCATED
        if sample.status.is_finished or gave_up:
            return Begun(sample, numbers, None, False, 0)
        scope, goes_on, num_trained_tokens = SampleScope(), sample.response_length > 0, sample.num_trained_tokens
        with use_scope(scope):
            params = seeded(self.config, sample, {**sampling_params, "max_new_tokens": left})
            scope.task = tasks.create_task(self._generate_one(sample, params))
        if on_start is not None:
            on_start(scope)
        return Begun(sample, numbers, scope, goes_on, num_trained_tokens)

    def _produced(self, begun: Begun) -> list[Sample]:
        """What the generate function has made of a sample, checked; an episode of several that is not whole is none."""
        sample, scope = begun.sample, begun.scope
        if scope is None or scope.task is None:
            return [sample]
        if not scope.task.cancelled():
            produced = scope.task.result()
        elif scope.interrupted:
            sample.status = Status.ABORTED  # it may have ended a turn, but not the sample
            produced = [sample]
            _check_generated(self._generate_flag, sample)
        else:
            raise ValueError(f"{self._functions} raised CancelledError, for sample {sample.index}; {DROP_HINT}")
        if len(produced) > 1 and any(made.status in (Status.ABORTED, Status.PENDING) for made in produced):
            # Pieces that went on one by one would each become several again.
            _check_fields(self._generate_flag, sample)
            sample.clear_response()
            sample.status, produced = Status.ABORTED, [sample]
        self._account(begun, scope, produced)
        return produced

    def _leave_out_unfinished(self, group: Group, wants_all: bool) -> str | None:
        """Take late and failed samples out of the group where it can do without them; else say what it must do."""
        finished = [sample for sample in group.samples if sample.status.is_finished]
        if len(finished) == len(group.samples):
            return None
        minimum = self.config.asynchrony.min_samples_per_group
        alive = [sample for sample in group.samples if sample.status is not Status.FAILED]
        if len(alive) < len(group.samples) and (minimum is None or num_attempts(alive) < minimum):
            return FAILED
        can_do_without = minimum is not None and num_attempts(finished) >= minimum
        if can_do_without and (not wants_all or len(finished) == len(alive)):
            unfinished = {i: s for i, s in enumerate(group.samples) if not s.status.is_finished}
            self.wasted_tokens += group.leave_out(
                {i: "failed" if s.status is Status.FAILED else "late" for i, s in unfinished.items()}
            )
            return None
        return UNFINISHED

    async def score(self, samples: list[Sample]) -> None:
        """Set `reward` (and `reward_info`) of every sample."""
        started = time.monotonic()
        group = samples[0].group_index
        with (
            own_code(reward_flag(self.config), f", for group {group}; {DROP_HINT}"),
            current_runtime().trace.span("rewards", "reward", group=group),
        ):
            values = await self.reward(self.config, list(samples))  # a list of its own, that it may empty
        self.reward_seconds += time.monotonic() - started
        set_rewards(self.config, samples, values)

    async def _generate_one(self, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        """What the generate function makes of a sample, checked."""
        path, flag = self.config.rollout.generate_function_path, self._generate_flag
        # Ours tell of the engine's answer and of the client's deadline; an own one's ValueError may be any.
        explained = () if ":" in path else (ValueError, TimeoutError)
        with own_code(flag, f", for sample {sample.index}; {DROP_HINT}", explained):
            result: Any = await self.generate(self.config, sample, sampling_params)
        produced = result if isinstance(result, list) else [result]
        if not produced:
            raise ValueError(f"{flag} returned an empty list for sample {sample.index}; give it Status.FAILED instead")
        for made in produced:
            _check_fields(flag, made)
        if len({id(made) for made in produced}) < len(produced):
            raise ValueError(f"{flag} returned one Sample object twice for sample {sample.index}")
        scope = current_scope()
        was_cut = scope is not None and scope.was_cut
        for made in produced:
            if was_cut and made.status.is_finished:
                made.status = Status.ABORTED  # the engine has not ended it: nobody may take it for whole
            _check_generated(flag, made)
            if made.status is Status.PENDING and not was_cut and not (scope is not None and scope.interrupted):
                raise ValueError(f"{flag}: sample {made.index} is still pending; set its status, such as COMPLETED")
        return produced

    @property
    def _generate_flag(self) -> str:
        return f"--generate-function-path {self.config.rollout.generate_function_path}"

    def _account(self, begun: Begun, scope: SampleScope, produced: list[Sample]) -> None:
        """Of a sample that is or was interrupted: tokens that are in no loss any more, such as those of an episode that
        cannot go on."""
        if begun.goes_on or scope.interrupted or scope.was_cut:
            has = sum(sample.num_trained_tokens for sample in produced)
            self.wasted_tokens += max(0, begun.num_trained_tokens + scope.num_sampled - has)
        if begun.goes_on and self.config.asynchrony.mask_offpolicy_in_partial_rollout:
            self.wasted_tokens += sum(mask_older(sample) for sample in produced)


def prepare(config: Config, samples: list[Sample]) -> None:
    """Tokenise the prompt once for all its samples; one that comes back with tokens keeps them."""
    bare = [sample for sample in samples if not sample.tokens]
    if not bare:
        return
    sample = bare[0]
    tokens = encode_prompt(config, current_runtime().tokenizer, sample.prompt, sample.metadata)
    limit = config.sampling.max_prompt_len
    if len(tokens) > limit:  # files are checked at the start; other sources only here
        raise ValueError(
            f"the prompt of group {sample.group_index} has {len(tokens)} tokens, over --max-prompt-len {limit}"
        )
    for sample in bare:
        sample.set_prompt_tokens(tokens)


def encode_prompt(
    config: Config, tokenizer: Any, prompt: str | list[dict[str, Any]], metadata: dict[str, Any]
) -> list[int]:
    """Token ids `[P]` of a prompt, its tools rendered by the chat template.

    Raises:
        ValueError: the template or the tools reject it, or its metadata has what an episode would overwrite.
    """
    if STATE_KEY in metadata and keeps_episodes(config):
        raise ValueError(
            f"metadata[{STATE_KEY!r}] is where --generate-function-path {config.rollout.generate_function_path} keeps "
            f"what came of an episode, so a prompt cannot bring its own, got {metadata[STATE_KEY]!r:.80}; rename it"
        )
    return render_prompt(tokenizer, prompt, config.data.apply_chat_template, row_tools(config, metadata))


_KINDS = {
    **{"status": Status, "response": str, "prompt_length": int, "metadata": dict, "reward_info": dict},
    **dict.fromkeys(("index", "group_index", "rollout_id"), int),
    **dict.fromkeys(("tokens", "loss_mask", "rollout_log_probs", "weight_versions"), list),
}


def mask_older(sample: Sample) -> int:
    """Leave tokens out of the loss that older weights sampled than its newest ones; returns how many."""
    newest = max((v for v, kept in zip(sample.weight_versions, sample.loss_mask, strict=True) if kept), default=-1)
    before = sample.num_trained_tokens
    for i, version in enumerate(sample.weight_versions):
        if 0 <= version < newest:
            sample.loss_mask[i] = 0
    return before - sample.num_trained_tokens


def set_rewards(config: Config, samples: list[Sample], values: Any) -> None:
    """Check what a reward function returned and write it into the samples.

    Raises:
        ValueError: not one value per sample, or a value that is no finite number; names the flag and the value.
    """
    for sample, (number, info) in zip(samples, read_values(reward_flag(config), samples, values), strict=True):
        sample.reward, sample.reward_info = number, info


def reward_flag(config: Config) -> str:
    """The flag and value that chose the reward function, for messages."""
    path = config.reward.reward_function_path
    return f"--reward-function-path {path}" if path is not None else f"--rm-type {config.reward.rm_type}"


def _check_fields(flag: str, sample: Any) -> None:
    if not isinstance(sample, Sample):
        raise ValueError(f"{flag} must return a Sample or a list of them, got {type(sample).__name__}")
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(sample, name), kind):
            what = "an int" if kind is int else f"a {kind.__name__}"
            raise ValueError(f"{flag}: {name} of sample {sample.index} must be {what}, got {value!r:.60}")


def _check_apart(flag: str, begun: list[Begun], produced: list[list[Sample]]) -> None:
    """What came of different samples of a group is different objects with numbers of their own.

    Those with one rollout_id count as one episode: draws that share it would be compared with nothing.
    """
    objects: dict[int, Numbers] = {}
    owners: dict[str, dict[int, Numbers]] = {"index": {}, "rollout_id": {}}
    for one, samples in zip(begun, produced, strict=True):
        for made in samples:
            given = one.numbers
            if made.group_index != given.group_index:
                raise ValueError(
                    f"{flag}: group_index of sample {given.index} must stay {given.group_index}, got "
                    f"{made.group_index!r:.60}"
                )
            if (other := objects.setdefault(id(made), given)) != given:
                raise ValueError(
                    f"{flag} returned one Sample object for samples {other.index} and {given.index}; each needs its own"
                )
            for name, owner in owners.items():
                value = getattr(made, name)
                other = owner.setdefault(value, given)
                if getattr(other, name) != getattr(given, name):
                    raise ValueError(
                        f"{flag} returned {name} {value!r:.60} for samples {other.index} and {given.index}; only what "
                        "came out of one of them may share it"
                    )


def _check_generated(flag: str, sample: Sample) -> None:
    if sample.response_length != len(sample.tokens) - sample.prompt_length:
        raise ValueError(
            f"{flag}: sample {sample.index} has {len(sample.tokens) - sample.prompt_length} response tokens but "
            f"{sample.response_length} mask entries; grow responses with Sample.append_tokens only"
        )
    for name, numbers in (("rollout_log_probs", sample.rollout_log_probs), ("weight_versions", sample.weight_versions)):
        if len(numbers) != sample.response_length or not all_finite(numbers):
            raise ValueError(
                f"{flag}: sample {sample.index} must have one finite number for each of its {sample.response_length} "
                f"response tokens in {name}; grow responses with Sample.append_tokens only"
            )
    if not {0, 1}.issuperset(sample.loss_mask):
        raise ValueError(f"{flag}: the loss_mask of sample {sample.index} must be 0 or 1, got {set(sample.loss_mask)}")
    if sample.status.is_finished and sample.response_length == 0:
        raise ValueError(f"{flag}: sample {sample.index} is {sample.status} without a single response token")
