"""Groups that are being generated: one task each, all owned here, each entered into the ledger when it ends.

    start ──► running ──┬─ kept ───────► buffer.admit
                        ├─ filtered ───► buffer.drop(reason)
                        └─ unfinished ─► buffer.requeue, with its tokens (--partial-rollout) or without

A watch keeps --sample-deadline-s and sees to it that what was interrupted ends: aborts at the engines are repeated (one
may overtake its request), and what does not listen is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from slime_rl.protocols import DataBuffer
from slime_rl.rollout.generate import train_sampling_params
from slime_rl.rollout.groups import UNFINISHED, GroupRunner
from slime_rl.rollout.lengths import LengthHistory
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import SampleScope
from slime_rl.types import Group

WATCH_S = 0.2  # between looks at deadlines and interruptions
GRACE_S = 10.0  # from an interruption to the end of those who do not listen; an abort takes an engine one forward pass

Fate = Literal["keep", "restart", "drop"]


@dataclass(eq=False)
class Flight:
    """One group under way."""

    group: Group
    version: int  # no token of this attempt or of earlier ones that were kept is older
    attempts: int  # of the group before this one
    open_samples: int  # not finished yet
    scopes: list[SampleScope] = field(default_factory=list)
    fate: Fate = "keep"  # what becomes of it when it ends unfinished
    surplus: bool = False  # handed back for no fault of its own
    interrupted_at: float | None = None
    was_cancelled: bool = False

    @property
    def longest(self) -> int:
        """Tokens of its longest response so far, of samples that it was left without too."""
        lengths = [sample.response_length for sample in self.group.samples if isinstance(sample.loss_mask, list)]
        return max([*lengths, *(scope.num_sampled for scope in self.scopes)], default=0)

    def cancel(self, task: asyncio.Task[str | None]) -> None:
        """Once: a further cancellation would break off the waiting for what does not end."""
        if not self.was_cancelled:
            self.was_cancelled = True
            task.cancel()


def _is_interrupted(flight: Flight) -> bool:
    """Whether we ended the whole group: then it is not cut to the samples that happened to be finished."""
    return flight.interrupted_at is not None


class InFlight:
    """See the picture above. Used by one task, whose end must be followed by `close`."""

    def __init__(self, runner: GroupRunner, buffer: DataBuffer, history: LengthHistory | None = None) -> None:
        self.runner, self.buffer = runner, buffer
        self.options = runner.config.asynchrony
        self.history = history or LengthHistory()
        self.flights: dict[asyncio.Task[str | None], Flight] = {}
        self.on_admit: Callable[[Group], None] = lambda group: None
        self.on_over_age: Callable[[int], None] = lambda num_tokens: None  # of interrupted ones
        self.open_samples = 0  # of all groups: what may be at the engines now
        self.wake_by_sample = False  # whether `settle` returns for samples too, whose slots may be filled again
        self.num_interrupted = 0
        self._params = train_sampling_params(runner.config)
        self._watch: asyncio.Task[None] | None = None
        self._ended: list[asyncio.Task[str | None]] = []
        self._woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self.flights)

    def start(self, groups: Iterable[Group], version: int) -> None:
        """Begin `groups`, whose new tokens are sampled by `version` or later weights."""
        groups = list(groups)
        if self.options.rollout_order == "longest_first":
            groups = self.history.longest_first(groups)
        for group in groups:
            oldest = group.oldest_version
            version_of_oldest = version if oldest is None else min(oldest, version)
            unfinished = sum(not sample.status.is_finished for sample in group.samples)
            flight = Flight(group, version_of_oldest, group.attempts, unfinished)
            self.open_samples += unfinished
            follow, wants_all = partial(self._follow, flight), partial(_is_interrupted, flight)
            task = asyncio.create_task(self.runner.run(group, self._params, follow, wants_all))
            task.add_done_callback(self._end)
            self.flights[task] = flight
        if self.options.sample_deadline_s is not None:
            self._ensure_watch()

    async def settle(self, timeout_s: float | None = None) -> None:
        """Wait until a group has ended (or a sample, with `wake_by_sample`), or `wake`; enter ended groups.

        Raises what a group's task raised.
        """
        if timeout_s is None:
            await self._woken.wait()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), timeout_s)
        self._woken.clear()
        if self._watch is not None and self._watch.done():
            self._watch.result()  # nothing else would tell of its failure
        while self._ended:
            task = self._ended.pop(0)
            self._enter(self.flights.pop(task), UNFINISHED if task.cancelled() else task.result())

    def wake(self) -> None:
        """Let `settle` return."""
        self._woken.set()

    def _follow(self, flight: Flight, scope: SampleScope) -> None:
        """Count the sample as open until its task is done."""

        def close(_: object) -> None:
            closed = min(1, flight.open_samples)
            flight.open_samples -= closed
            self.open_samples -= closed
            if self.wake_by_sample:
                self._woken.set()

        assert scope.task is not None
        if flight.interrupted_at is not None:  # before it had begun
            scope.interrupt(flight.interrupted_at)
        flight.scopes.append(scope)
        scope.task.add_done_callback(close)

    def _end(self, task: asyncio.Task[str | None]) -> None:
        self._ended.append(task)
        self._woken.set()

    def _enter(self, flight: Flight, verdict: str | None) -> None:
        group = flight.group
        self.open_samples -= flight.open_samples
        flight.open_samples = 0
        record = self.history.record if verdict != UNFINISHED else self.history.record_begun
        record(group.source_index, flight.longest)
        if verdict is None:
            self.buffer.admit(group)
            self.on_admit(group)
        elif verdict != UNFINISHED:
            self.buffer.drop(group, verdict)
        else:
            self._give_back(flight)

    def _give_back(self, flight: Flight) -> None:
        group = flight.group
        self.num_interrupted += 1
        if flight.surplus:
            group.attempts = flight.attempts
        if flight.fate != "keep":
            self.on_over_age(group.num_trained_tokens)
        exhausted = not flight.surplus and group.attempts >= self.options.max_group_attempts
        if flight.fate == "drop" or exhausted:
            self.runner.wasted_tokens += group.num_trained_tokens
            self.buffer.drop(group, "over_age" if flight.fate != "keep" else "late_samples")
            return
        if flight.fate == "restart" or not self.options.partial_rollout:
            self.runner.wasted_tokens += group.reset()
        self.buffer.requeue(group)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        counts = {
            "rollout/interrupted_groups": float(self.num_interrupted),
            "rollout/wasted_tokens": float(self.runner.wasted_tokens),
        }
        self.num_interrupted = self.runner.wasted_tokens = 0
        return counts

    async def interrupt(self, flights: Iterable[Flight], *, fate: Fate = "keep", surplus: bool = False) -> None:
        """Have these groups end soon; `settle` enters them like any other."""
        now = asyncio.get_running_loop().time()
        for flight in flights:
            flight.fate, flight.surplus, flight.interrupted_at = fate, surplus, now
            for scope in flight.scopes:
                scope.interrupt(now)
        await self._abort_interrupted()
        self._ensure_watch()

    async def hand_back(self) -> None:
        """Interrupt all that run and put them back into the buffer; what finishes on the way is admitted."""
        await self.interrupt(self.flights.values(), surplus=True)
        while self.flights:
            for task, flight in self.flights.items():
                if not any(scope.is_running for scope in flight.scopes) and not task.done():
                    flight.cancel(task)  # generated: a slow judge is not waited for
            await self.settle(WATCH_S)

    async def close(self) -> None:
        """Cancel everything; groups that were running stay reserved. For the end of a run or after an error."""
        tasks: list[asyncio.Task[str | None] | asyncio.Task[None]] = [*self.flights]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # cancelled: their outcome no longer matters
        self.flights.clear()

    def _ensure_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._keep_watch())
            self._watch.add_done_callback(lambda _: self.wake())

    async def _keep_watch(self) -> None:
        """Runs while groups do."""
        now = asyncio.get_running_loop().time
        while self.flights:
            for task, flight in self.flights.items():
                self._look_at(task, flight, now())
            await self._abort_interrupted()
            await asyncio.sleep(WATCH_S)

    def _look_at(self, task: asyncio.Task[str | None], flight: Flight, now: float) -> None:
        """Interrupt late samples; cancel what was interrupted and has not ended in time."""
        deadline_s = self.options.sample_deadline_s
        for scope in flight.scopes:
            if deadline_s is not None and scope.is_running and not scope.queued:
                scope.started_at = now if scope.started_at is None else scope.started_at
                if now > scope.started_at + scope.queued_s + deadline_s:
                    scope.interrupt(now)
            if scope.interrupted_at is not None and now > scope.interrupted_at + GRACE_S:
                scope.cancel()
        if flight.interrupted_at is not None and now > flight.interrupted_at + 2 * GRACE_S:
            flight.cancel(task)

    async def _abort_interrupted(self) -> None:
        scopes = [scope for flight in self.flights.values() for scope in flight.scopes if scope.interrupted]
        requests = [request_id for scope in scopes for request_id in scope.requests]
        client = current_runtime().client
        if requests and client is not None:
            await client.abort(requests)
