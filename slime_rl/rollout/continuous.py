"""`--fully-async`: one producer that keeps generating while training goes on, within `--max-staleness` K.

                 weights_are(v): room grows          take(step): room moves on by a step
                          ▼                                     ▼
    buffer ──reserve──► running groups ──admit──► generated ──► not over age, enough, none left behind ──► batch
       ▲                    │ interrupted                │ over age
       └────────────────────┴────── requeue ─────────────┘

Three rules keep every trained token within K versions of the trainer (B groups a step; step s trains on version s):

1. Room. With weights v, at most (v + K + 1) B groups are opened since step 0, so all that is open can train in time.
2. Stalest first, and a step waits (--wait-for-aging) until what stays behind still fits into the steps before its
   deadline: a group begun with version v must train in step v + K at the latest.
3. At take, groups with an older token, however they came to it (a resume, another --buffer-filter-path), are taken out
   and requeued or dropped, or those tokens masked, as --over-age says.

With K = 0 nothing may run while the trainer does: that is the synchronous loop (stepped.py), not this one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.ages import AgeLimit
from slime_rl.rollout.group_loop import too_many_dropped
from slime_rl.rollout.groups import GroupRunner
from slime_rl.rollout.in_flight import InFlight
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Group, RolloutOutput


class ContinuousProduction:
    """See the picture above. Made inside of a rollout runtime, `next_step` being the step that trains next."""

    def __init__(self, config: Config, buffer: DataBuffer, next_step: int) -> None:
        self.config, self.options, self.buffer = config, config.asynchrony, buffer
        self.batch_size, self.bound = config.train.rollout_batch_size, config.asynchrony.max_staleness
        self.extra = max(0, (config.buffer.over_sampling_batch_size or 0) - self.batch_size)
        slots = config.rollout.rollout_concurrency * config.cluster.rollout_num_engines
        self.slots = max(slots, config.train.n_samples_per_prompt)
        self.version = self.next_step = next_step
        self.runner = GroupRunner(config)
        self.flight = InFlight(self.runner, buffer, current_runtime().lengths)
        self.flight.on_admit, self.flight.wake_by_sample = self._remember, True
        self.generated: dict[int, int] = {}  # group_index -> version of its oldest token; not of before a resume
        self.ages = AgeLimit(self.options.over_age, buffer, self.runner)
        self.flight.on_over_age = lambda num_tokens: self.ages.note(1, num_tokens)
        self._dropped_before = self._dropped()
        self._taken_at = time.monotonic()
        self._progress = asyncio.Event()
        self._producer = asyncio.create_task(self._produce())

    def weights_are(self, version: int) -> None:
        """The engines serve `version` now: more groups may begin."""
        self.version = version
        self.flight.wake()

    def submit_through(self, step: int) -> None:
        """Nothing to do: production never stops."""

    async def take(self, step: int) -> RolloutOutput:
        """Wait until `step` can train, then take its groups.

        Raises whatever made production fail, or ValueError when the dynamic filter drops nearly everything.
        """
        self._raise_failure()
        while not self._may_take(step):
            self._progress.clear()
            await self._progress.wait()
            self._raise_failure()
        groups = self.buffer.take(step, self.batch_size)
        for group in groups:
            self.generated.pop(group.group_index, None)
        groups = self.ages.mask(groups, step - self.bound)
        self.next_step = step + 1
        self._dropped_before = self._dropped()
        await self._interrupt_late(step)
        metrics = self._metrics()
        self.flight.wake()
        return RolloutOutput(groups=groups, metrics=metrics)

    def _raise_failure(self) -> None:
        if self._producer.done():
            self._producer.result()

    async def _interrupt_late(self, step: int) -> None:
        """End what runs and can no longer train in time, rather than let it keep the engines busy.

        Where late groups are waited for, that can only be surplus of over-sampling: it has used up no attempt.
        """
        if self.options.over_age != "mask":
            running = [flight for flight in self.flight.flights.values() if flight.fate == "keep"]
            late = [flight for flight in running if self._deadline(flight.version) <= step]
            fate = "drop" if self.options.over_age == "drop" else "restart"
            await self.flight.interrupt(late, fate=fate, surplus=self.options.wait_for_aging)

    async def close(self) -> None:
        """Cancel all that runs; its groups stay reserved."""
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)  # its failure was raised by take
        await self.flight.close()

    async def _produce(self) -> None:
        """Consumes room and prompts; ends with the first error, which `take` raises."""
        try:
            while True:
                room = self._room()
                if room > 0:
                    self._check_drops(self.next_step, self.bound + 1)  # nobody takes while the trainer is busy
                    groups = self.ages.reserve(room, self.next_step - self.bound)
                    self.flight.start(groups, self.version)
                await self.flight.settle()
                self._progress.set()
        finally:
            self._progress.set()

    def _room(self) -> int:
        """Groups that may begin now."""
        counts = self.buffer.counts()
        last_step = min(self.version + self.bound, self.config.train.num_steps - 1)
        open_groups = counts["reserved"] + counts["generated"]
        num_steps = last_step + 1 - self.next_step
        if num_steps <= 0:  # nor may surplus begin that is over age before it can train
            return 0
        allowed = num_steps * self.batch_size + self.extra - open_groups
        return min(allowed, (self.slots - self.flight.open_samples) // self.config.train.n_samples_per_prompt)

    def _check_drops(self, step: int, num_steps: int) -> None:
        """Raise ValueError where more was dropped since the last take than `num_steps` may (--max-sampling-rounds)."""
        dropped = self._dropped() - self._dropped_before
        if dropped > self.config.buffer.max_sampling_rounds * self.batch_size * num_steps:
            raise ValueError(too_many_dropped(self.config, step, self.buffer, f"{dropped} drops"))

    def _may_take(self, step: int) -> bool:
        """Whether there are enough groups, and every group that would stay behind can still train in time."""
        self._take_out_over_age(step)
        if len(self.buffer) < self.batch_size:
            self._check_drops(step, 1)
            return False
        if not self.options.wait_for_aging or self.options.over_age == "mask":
            return True
        running = Counter(self._deadline(f.version) for f in self.flight.flights.values() if f.fate == "keep")
        finished = Counter(self._deadline(version) for version in self.generated.values())
        num_running = num_finished = 0
        for deadline in range(step, step + self.bound):
            num_running += running[deadline]
            num_finished += finished[deadline]
            fits = num_running <= (deadline - step) * self.batch_size + self.extra
            if not fits and num_finished < self.batch_size:
                return False
        return True

    def _take_out_over_age(self, step: int) -> None:
        """Rule 3: what is generated has no token older than `step - K` afterwards; masking waits until it is taken."""
        oldest = step - self.bound
        if self.ages.let_go(oldest):
            self.generated = {index: version for index, version in self.generated.items() if version >= oldest}
            self.flight.wake()

    def _remember(self, group: Group) -> None:
        oldest = group.oldest_version
        self.generated[group.group_index] = self.version if oldest is None else oldest

    def _deadline(self, version: int) -> int:
        """Last step that may train on tokens of `version`."""
        return version + self.bound

    def _dropped(self) -> int:
        return self.buffer.counts()["dropped"]

    def _metrics(self) -> dict[str, float]:
        now = time.monotonic()
        metrics = {
            "rollout/seconds": now - self._taken_at,
            "rollout/reward_seconds": self.runner.reward_seconds,
            **self.ages.metrics(),
            "rollout/groups_in_flight": float(len(self.flight)),
            **self.flight.metrics(),
        }
        self._taken_at, self.runner.reward_seconds = now, 0.0
        return metrics
