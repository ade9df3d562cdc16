"""The records that pass between prompts, engines, rewards and the trainer. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_REWARD = 3.4e38  # training holds rewards in float32


class Status(StrEnum):
    """Where one sample stands."""

    PENDING = "pending"  # nothing generated yet
    COMPLETED = "completed"  # the policy ended it (EOS or a stop string)
    TRUNCATED = "truncated"  # it ran into a length limit
    ABORTED = "aborted"  # interrupted by us; may continue later with the rest of its budget
    FAILED = "failed"  # generation or reward gave up on it; never trained on

    @property
    def is_finished(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


def all_finite(numbers: Sequence[Any]) -> bool:
    """Whether all of them are numbers, and none is NaN or infinite."""
    try:
        return math.isfinite(sum(numbers))  # ten times as fast as a look at each
    except TypeError:
        return False


def finite_number(value: Any) -> float | None:
    """`value` (number, bool, or tensor of one) as a float; None where it is none that training can hold."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except Exception:  # of a tensor with several elements or an object of the user's, anything
        return None
    return number if abs(number) <= MAX_REWARD else None


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt, token by token.

    Shapes: L = prompt plus response tokens, R = response tokens. Invariant: `loss_mask`, `rollout_log_probs` and
    `weight_versions` have R entries and `tokens` has `prompt_length + R`; only `append_tokens` makes R grow.
    """

    index: int  # unique over the run
    group_index: int  # samples of one prompt share it
    rollout_id: int  # samples that came out of one episode share it and count once; equals index for a single turn
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # [L]
    prompt_length: int = 0
    response: str = ""
    loss_mask: list[int] = field(default_factory=list)  # [R] 1 = trained on, 0 = tool or environment text
    rollout_log_probs: list[float] = field(default_factory=list)  # [R] natural log, from the engine
    weight_versions: list[int] = field(default_factory=list)  # [R] from the engine's answer, -1 where no model sampled
    reward: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.PENDING

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)

    @property
    def num_trained_tokens(self) -> int:
        """Response tokens in the loss."""
        return self.loss_mask.count(1)

    @property
    def response_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def set_prompt_tokens(self, tokens: list[int]) -> None:
        """Start the sample from its tokenised prompt `[P]`; allowed only before anything is generated."""
        if self.loss_mask:
            sampled = len(self.loss_mask)
            raise ValueError(f"sample {self.index}: prompt tokens cannot change after {sampled} were sampled")
        self.tokens = list(tokens)
        self.prompt_length = len(tokens)

    def clear_response(self) -> None:
        """Back to the bare prompt, to be generated again."""
        self.tokens = self.tokens[: self.prompt_length]
        self.response, self.loss_mask, self.rollout_log_probs, self.weight_versions = "", [], [], []
        self.reward, self.reward_info, self.status = None, {}, Status.PENDING

    def append_tokens(
        self,
        tokens: list[int],
        *,
        log_probs: list[float] | None = None,
        versions: list[int] | None = None,
        trained: bool = True,
    ) -> None:
        """Append `[n]` tokens to the response and keep every `[R]` field aligned.

        Sampled tokens bring `log_probs` and `versions`; environment text passes `trained=False` and neither.
        """
        n = len(tokens)
        if log_probs is None and versions is None and not trained:
            log_probs, versions = [0.0] * n, [-1] * n
        if log_probs is None or versions is None or len(log_probs) != n or len(versions) != n:
            have = (n, None if log_probs is None else len(log_probs), None if versions is None else len(versions))
            raise ValueError(
                f"sample {self.index}: tokens, log-probs and versions must have equal lengths, got {have}; "
                "pass trained=False for text that no model sampled"
            )
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(trained)] * n)
        self.rollout_log_probs.extend(log_probs)
        self.weight_versions.extend(versions)


@dataclass(kw_only=True)
class Group:
    """All samples of one prompt; the unit that the data buffer keeps account of.

    `group_index` is stable: it is given when the prompt is first reserved and survives restarts.
    """

    group_index: int
    source_index: int  # row of the prompt source
    epoch: int
    samples: list[Sample]
    attempts: int = 0  # how often generation was started for it
    left_out: dict[str, int] = field(default_factory=dict)  # samples that were taken out of it, by reason
    replays: int = 0  # how often it has trained before (--replay-groups)

    def leave_out(self, reasons: dict[int, str]) -> int:
        """Take samples out, given as position -> reason; they count under it. Returns the tokens of their loss."""
        for reason in reasons.values():
            self.left_out[reason] = self.left_out.get(reason, 0) + 1
        tokens = sum(self.samples[i].num_trained_tokens for i in reasons)
        self.samples = [sample for i, sample in enumerate(self.samples) if i not in reasons]
        return tokens

    def reset(self) -> int:
        """Let go of all that was generated, so that a buffer begins it anew. Returns the tokens of the loss."""
        tokens = self.num_trained_tokens
        for sample in self.samples:
            sample.clear_response()
        self.left_out = {}
        return tokens

    @property
    def oldest_version(self) -> int | None:
        """Lowest weight version that sampled a token of the group's loss; None before generation."""
        return min((span[0] for sample in self.samples if (span := _versions_in_loss(sample))), default=None)

    @property
    def newest_version(self) -> int | None:
        """Highest weight version that sampled a token of the group's loss; None before generation."""
        return max((span[1] for sample in self.samples if (span := _versions_in_loss(sample))), default=None)

    @property
    def num_trained_tokens(self) -> int:
        """Response tokens in the group's loss."""
        return sum(sample.num_trained_tokens for sample in self.samples)


def _versions_in_loss(sample: Sample) -> tuple[int, int] | None:
    """The lowest and the highest version that sampled a token of the sample's loss."""
    versions, mask = sample.weight_versions, sample.loss_mask
    # Nearly always the versions are one and all tokens train, and counting takes a tenth of a look at each.
    is_one = bool(versions) and versions.count(versions[0]) == len(versions)
    lowest = versions[0] if is_one else min(versions, default=-1)
    if lowest >= 0 and mask.count(1) == len(mask):
        return lowest, lowest if is_one else max(versions)
    trained = [version for version, kept in zip(versions, mask, strict=True) if kept and version >= 0]
    return (min(trained), max(trained)) if trained else None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt source after reading and checking."""

    source_index: int
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]


@dataclass(kw_only=True)
class EnvironmentStart:
    """What an environment begins an episode with: chat messages, and JSON schemas of the tools it understands."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(kw_only=True)
class EnvironmentStep:
    """How an environment answers one turn of the policy. The episode's reward is the sum over its steps."""

    messages: list[dict[str, Any]] = field(default_factory=list)  # what the policy reads next; unused when done
    reward: float = 0.0
    done: bool = False


@dataclass(kw_only=True)
class RolloutOutput:
    """What a rollout function returns for one step: the groups to train on and its metrics."""

    groups: list[Group]
    metrics: dict[str, float]
