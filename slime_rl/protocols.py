"""Every extension point, as the signature a plugin must have. Each is chosen by the flag named in its docstring.

A plugin is a registered name or `package.module:attribute`. Its parameters are checked when the run starts, so a
plugin that does not fit fails before any engine does work. `config` is always the whole frozen `Config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from slime_rl.types import EnvironmentStart, EnvironmentStep, Group, Prompt, RolloutOutput, Sample

if TYPE_CHECKING:
    from slime_rl.algorithms.batch import AdvantageBatch, LossBatch, LossOutput, OffPolicyOutput
    from slime_rl.config import Config


@runtime_checkable
class DataBuffer(Protocol):
    """`--buffer-path`: the ledger between rollout and training. The class is constructed as `cls(config, source)`.

    Every group is in one state: waiting -> reserved -> generated -> admitted(step) -> committed(step), or
    dropped(reason). `load_state_dict` puts reserved groups back to waiting and admitted ones back to generated.
    """

    def reserve(self, num_groups: int) -> list[Group]:
        """waiting -> reserved: prompts to generate for, requeued ones first (lowest group_index), then new ones."""
        ...

    def admit(self, group: Group) -> None:
        """reserved -> generated: the group is complete, rewarded and passed the filters."""
        ...

    def requeue(self, group: Group) -> None:
        """reserved -> waiting: generation was interrupted; tokens already in the samples are kept.

        One without a response token is reserved again as it was at first: its prompt from the source, and
        --n-samples-per-prompt samples, whatever a generate function has made of them.
        """
        ...

    def drop(self, group: Group, reason: str) -> None:
        """reserved -> dropped(reason); counted under its reason."""
        ...

    def expire(self, min_version: int, action: Literal["drop", "requeue", "mask"]) -> tuple[int, int]:
        """Let go of generated groups with a token of the loss sampled before weight version `min_version`.

        drop: generated -> dropped("stale"). requeue: generated -> waiting without tokens, counted as requeued/stale;
        a group that has had --max-group-attempts is dropped all the same. mask: as requeue, but only those groups that
        have no younger token.

        Returns how many, and how many tokens of the loss (1 in the loss mask) they had.
        """
        ...

    def take(self, step: int, num_groups: int) -> list[Group]:
        """generated -> admitted(step): the groups that train in `step`. Taking a step again returns the same groups.

        Raises ValueError when fewer than `num_groups` are generated.
        """
        ...

    def commit(self, step: int) -> None:
        """admitted(step) -> committed(step): the optimizer has used them; payloads are released."""
        ...

    def counts(self) -> dict[str, int]:
        """Number of groups per state, and per reason as `dropped/<reason>` and `requeued/<reason>`."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def offload(self) -> None:
        """Move payloads out of host memory (to disk) until `onload` or the next take."""
        ...

    def onload(self) -> None: ...

    def close(self) -> None:
        """The run is over: remove what only the running buffer needs, such as spilled payloads."""
        ...

    def __len__(self) -> int:
        """Number of generated groups that wait for training."""
        ...


@runtime_checkable
class PromptSource(Protocol):
    """`--data-source-path`: where prompts come from. The class is constructed as `cls(config)`."""

    def next_prompts(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """The next prompts in order as (epoch, prompt), going on to the next epoch when one ends.

        A call that raises draws none: a checkpoint that is written after it must have them all ahead.
        """
        ...

    def get(self, source_index: int) -> Prompt:
        """The prompt of one row again, for resume."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __len__(self) -> int:
        """Rows in one epoch."""
        ...


@runtime_checkable
class LengthLimited(Protocol):
    """A PromptSource that can leave out or refuse long prompts before the run starts; optional."""

    def limit_lengths(self, encode: Callable[[Prompt], Sequence[int]]) -> None:
        """Apply --max-prompt-len and --long-prompt with `encode`, the rendering that generation uses."""
        ...


@runtime_checkable
class CountsSkippedRows(Protocol):
    """A PromptSource that passes rows over; optional."""

    def skipped_rows(self) -> dict[str, int]:
        """How many so far, by reason; they become buffer/skipped_rows/<reason> in the metrics."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A filter object that remembers something between calls; optional. Its state is part of the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BufferFilter(Protocol):
    """`--buffer-filter-path`: which of the generated groups train in `step`; num_groups of `groups`, unchanged."""

    def __call__(self, config: Config, step: int, groups: list[Group], num_groups: int) -> list[Group]: ...


class RolloutFunction(Protocol):
    """`--rollout-function-path`: fill the buffer until `step` can be taken, then take it."""

    async def __call__(self, config: Config, step: int, buffer: DataBuffer) -> RolloutOutput: ...


class GenerateFunction(Protocol):
    """`--generate-function-path`: produce the response(s) of one sample. A list counts as one episode."""

    async def __call__(
        self, config: Config, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample]: ...


class Agent(Protocol):
    """`--agent-path`: an agent with its own loop, talking to the gateway as if that were the OpenAI or Anthropic API.

    `data` has prompt, label, metadata and root_url. It returns its reward (a dict gives one to each role that it played
    as model policy/ROLE), or None when it posts it or another function scores the samples.
    """

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str) -> float | dict[str, float] | None: ...


@runtime_checkable
class Environment(Protocol):
    """`--environment-path`: a world that talks with the policy. Constructed as `cls(config, sample)` for every episode.

    Close is called once in any case. An environment that blocks runs its work in a thread or in the process fence.
    """

    async def reset(self) -> EnvironmentStart:
        """Begin an episode; its messages are the prompt in place of the row's."""
        ...

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        """Answer the policy's turn, a chat message of the assistant (with `tool_calls` where it called tools)."""
        ...

    async def close(self) -> None: ...


class RewardFunction(Protocol):
    """`--reward-function-path` (`--rm-type` for built-ins): one value per sample of the group, in order.

    A value is a number, or a dict with a numeric "score" whose other entries are kept for metrics.
    """

    async def __call__(self, config: Config, group: list[Sample]) -> list[float | dict[str, Any]]: ...


class GroupFilter(Protocol):
    """`--dynamic-filter-path`: None keeps the group, a string is the reason to drop it. It changes no sample."""

    def __call__(self, config: Config, group: list[Sample]) -> str | None: ...


class SampleFilter(Protocol):
    """`--sample-filter-path`: which samples of a kept group do not train.

    None keeps all, a string is the reason to drop them all, a list has None or a reason for each sample, in order. It
    changes no sample.
    """

    def __call__(self, config: Config, group: list[Sample]) -> str | list[str | None] | None: ...


class Curriculum(Protocol):
    """`--curriculum-path`: the rows that an epoch has, in the order that they train.

    `rows` is the epoch as it would be without it, `prompt_of(row)` reads one. It may leave rows out or repeat them. It
    must depend on its arguments alone: a resumed run asks again and must get the same.
    """

    def __call__(
        self, config: Config, epoch: int, rows: list[int], prompt_of: Callable[[int], Prompt]
    ) -> list[int]: ...


class LogFunction(Protocol):
    """`--log-function-path`: extra metrics from the samples of one step."""

    def __call__(self, config: Config, step: int, samples: list[Sample]) -> dict[str, float]: ...


class AdvantageFunction(Protocol):
    """`--advantage-path` (`--advantage-estimator`): token advantages `[T]` float32 of the whole global batch."""

    def __call__(self, config: Config, batch: AdvantageBatch) -> Any: ...


class PolicyLossFunction(Protocol):
    """`--loss-path` (`--policy-loss`): per-token loss `[T]` of one micro-batch; weighting comes after."""

    def __call__(self, config: Config, batch: LossBatch) -> LossOutput: ...


class OffPolicyFunction(Protocol):
    """`--off-policy-path` (`--off-policy-correction`): weights and mask for the gap between engine and trainer."""

    def __call__(self, config: Config, batch: LossBatch) -> OffPolicyOutput: ...


class ModelProvider(Protocol):
    """`--model-provider-path`: the Megatron model of this pipeline stage."""

    def __call__(self, config: Config, transformer_config: Any, pre_process: bool, post_process: bool) -> Any: ...


class ModelConversion(Protocol):
    """`--model-conversion-path`: weights between Hugging Face names and this rank's Megatron modules.

    The class is constructed as `cls(config, hf_path)`. Its attribute `architecture` (trainer/architecture.py) says what
    model is built. Most plugins set `family` on a subclass of `trainer.conversion.FamilyConversion`.
    """

    architecture: Any

    def load_weights(self, models: list[Any], hf_path: str) -> None: ...

    def export_weights(self, models: list[Any]) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, full tensor) on every rank, in a fixed order."""
        ...

    def kept_weights(self, hf_path: str) -> Iterator[tuple[str, Any]]:
        """Weights of the folder that no module holds and an exported folder must have all the same."""
        ...
