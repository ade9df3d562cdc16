"""The training side: groups of Ray actors with a Megatron worker each, called together because their collectives must
meet. The policy has a group, and a critic where --critic-num-workers says so:

    CriticGroup.train ─► critic workers: values ────┬──────────► critic's updates ─┐
                     ─► policy workers: log-probs ──┼─(--kl-coef)──────▲           ├─► metrics
    TrainGroup.train  ──────────────────────────────┴──────────► policy's updates ─┘

Values and log-probs go from worker to worker through the object store; the driver only has their references.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_rl.cluster.errors import NoPlace, TrainWorkerLost, no_place
from slime_rl.cluster.placement import Seats
from slime_rl.cluster.pulse import Pulse, end_process
from slime_rl.cluster.signals import signal_behind
from slime_rl.cluster.train_actors import CriticActor, MegatronActor, TrainActor
from slime_rl.cluster.train_calls import Call, collect
from slime_rl.config import Config

if TYPE_CHECKING:
    from slime_rl.trainer.token_log import TokenLog
    from slime_rl.weight_sync.memory import Action
    from slime_rl.weight_sync.report import SyncReport


@dataclass(frozen=True)
class StepBatch:
    """A step's samples in the object store: references of one batch per data-parallel rank of each group."""

    policy: list[Any]
    critic: list[Any]  # empty unless the critic has its own group


@dataclass(frozen=True)
class CriticStep:
    """A critic's step that is under way."""

    given: list[Any]  # references of what the policy's workers need: the critic's values, and their own log-probs
    updates: list[Call]  # each ends with the critic's metrics


class MegatronGroup:
    """Calls every worker and waits for all; the first failure is raised with the worker's own traceback.

    Every call raises TrainWorkerLost, naming the worker, when the process of one has ended or stands still.
    """

    kind: ClassVar[type[MegatronActor]]
    who: ClassVar[str]

    def __init__(self, config: Config, seats: Seats, num_workers: int) -> None:
        self.config, self.seats, self.num_workers = config, seats, num_workers
        self.data_parallel_ranks: list[int] = []
        self.pulses: list[Pulse] = []
        self._planning: list[Call] = []  # of a save; nothing else meets in collectives before it is over
        self._failed_save: Exception | None = None  # after it some workers may wait for others for ever
        self.actors = self._make([seats.gpu(rank) for rank in range(num_workers)])

    def _make(self, gpus: list[int | None]) -> list[Any]:
        return [
            ray.remote(self.kind)
            .options(**self.seats.options(rank))
            .remote(self.config, rank, self.num_workers, gpus[rank])
            for rank in range(self.num_workers)
        ]

    def start(self) -> list[Any]:
        """Begin building the workers; what the returned references resolve to is for `connect`.

        Raises:
            NoPlace: Ray has no place for one of them within --start-timeout-s.
        """
        limit_s, ready = self.config.cluster.start_timeout_s, [actor.__ray_ready__.remote() for actor in self.actors]
        if ray.wait(ready, num_returns=len(ready), timeout=limit_s)[1]:
            raise no_place(limit_s)
        address, port = ray.get(self.actors[0].rendezvous.remote())
        return [actor.start.remote(address, port) for actor in self.actors]

    def connect(self, started: list[tuple[int, Pulse]]) -> None:
        """Take note of the started workers' data-parallel ranks and pulses."""
        self.data_parallel_ranks = [rank for rank, _ in started]
        self.pulses = [pulse for _, pulse in started]

    def restart(self) -> None:
        """End every worker and build new ones, with the first weights and a fresh optimizer.

        Raises:
            TrainWorkerLost: one of the new ones was lost, or Ray has no place for it within --start-timeout-s.
        """
        for actor in self.actors:
            ray.kill(actor)
        for pulse in self.pulses:  # Ray does not end a stopped process
            on_its_node = NodeAffinitySchedulingStrategy(pulse.node_id, soft=True)
            options: Any = {"num_cpus": 0, "scheduling_strategy": on_its_node}
            ray.get(ray.remote(_end_process).options(**options).remote(pulse.node_id, pulse.pid))
        self.pulses, self._planning, self._failed_save = [], [], None
        try:
            self.actors = self._make(self.seats.present_gpus())
            self.connect(self.collect(self.calls(self.start())))
        except NoPlace as error:
            raise TrainWorkerLost(f"{self.who}s: {error}") from error

    def save(self, path: str, step: int) -> None:
        self._settle()
        with self._noting_failure():
            self._all("save", path, step)

    def begin_save(self, path: str, step: int) -> None:
        """Let the workers plan a checkpoint and write it, while engines generate; `finish_save` makes it whole.

        What goes wrong in planning is raised by the next call of the group.
        """
        self._settle()
        with self._noting_failure():
            self._planning = self.calls([actor.begin_save.remote(path, step) for actor in self.actors])

    def save_is_written(self) -> bool:
        """Whether `finish_save` would not wait; does not wait itself."""
        waiting = [call.reference for call in self._planning]
        if waiting and len(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) < len(waiting):
            return False
        return all(self._all("save_is_written"))

    def finish_save(self) -> None:
        self._settle()
        with self._noting_failure():
            self._all("finish_save")

    def load(self, path: str) -> None:
        self._all("load", path)

    def calls(self, references: list[Any]) -> list[Call]:
        """One call of each worker, by rank."""
        pulses = self.pulses or [None] * len(references)
        pairs = zip(references, pulses, strict=True)
        return [Call(f"{self.who} {rank}", reference, pulse) for rank, (reference, pulse) in enumerate(pairs)]

    def collect(self, calls: list[Call]) -> list[Any]:
        return collect(calls, self.config)

    def begin_train(self, step: int, shards: list[Any], given: list[Any]) -> list[Call]:
        """Every worker's step on the batch of its data-parallel rank."""
        self._settle()
        placed = zip(self.actors, self.data_parallel_ranks, strict=True)
        return self.calls([actor.train.remote(step, shards[rank], given) for actor, rank in placed])

    def begin_compute(self, method: str, shards: list[Any]) -> list[Any]:
        """References of the TokenFields of every sample: those of one worker per data-parallel rank."""
        self._settle()
        placed = zip(self.actors, self.data_parallel_ranks, strict=True)
        of_rank = {rank: actor.compute.remote(method, shards[rank]) for actor, rank in placed}
        return list(of_rank.values())

    def _settle(self) -> None:
        """Until a save that has begun is planned: a worker that failed in it would leave the others waiting for it."""
        if self._planning:
            with self._noting_failure():
                self.collect(self._planning)
            self._planning = []

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """A part of a save: where one has failed none is tried again, unless the workers are made anew."""
        if self._failed_save is not None:
            raise self._failed_save
        try:
            yield
        except Exception as error:
            if signal_behind(error) is None:
                self._planning, self._failed_save = [], error
            raise

    def _all(self, method: str, *args: Any) -> list[Any]:
        self._settle()
        return self.collect(self.calls([getattr(actor, method).remote(*args) for actor in self.actors]))


def _end_process(node_id: str, pid: int) -> None:
    """Runs on the process's node; where that is lost Ray runs it on another one, whose processes are none of ours."""
    if ray.get_runtime_context().get_node_id() == node_id:
        end_process(pid)


class TrainGroup(MegatronGroup):
    """The policy's workers."""

    kind, who = TrainActor, "train worker"

    def train(self, step: int, batch: StepBatch, critic: CriticStep | None = None) -> dict[str, float]:
        """Train on a step, with the values of a critic in another group; the metrics of both."""
        if critic is None:
            return self.collect(self.begin_train(step, batch.policy, []))[0]
        own = self.begin_train(step, batch.policy, critic.given)
        results = self.collect([*critic.updates, *own])
        return results[0] | results[-1]

    def token_log(self) -> TokenLog:
        """What the last step saw of the samples that are shown, from whichever workers had them."""
        return {sample: numbers for part in self._all("token_log") for sample, numbers in part.items()}

    def sync_weights(self, version: int, urls: list[str]) -> SyncReport:
        return self._all("sync_weights", version, urls)[0]

    def change_engine_memory(
        self, action: Action, urls: list[str], released: dict[str, set[str]]
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """See TrainActor.change_engine_memory; done by rank 0."""
        self._settle()
        reference = self.actors[0].change_engine_memory.remote(action, urls, released)
        return self.collect([Call(f"{self.who} 0", reference, self.pulses[0])])[0]

    def offload(self) -> None:
        """Move weights, gradients and optimizer state off the devices."""
        self._all("offload")

    def onload(self) -> None:
        self._all("onload")

    def load_weights(self, path: str) -> None:
        self._all("load_weights", path)

    def save_hf(self, path: str) -> None:
        self._all("save_hf", path)

    def stop(self) -> None:
        """Let every worker give back what outlives its process."""
        ray.wait([actor.close.remote() for actor in self.actors], num_returns=len(self.actors), timeout=10)


class CriticGroup(MegatronGroup):
    """The workers of a critic that is not beside the policy. They keep their devices while engines take turns."""

    kind, who = CriticActor, "critic worker"

    def __init__(self, config: Config, seats: Seats, policy: TrainGroup) -> None:
        super().__init__(config, seats, config.critic.critic_num_workers)
        self.policy = policy

    def train(self, step: int, batch: StepBatch) -> CriticStep:
        """Begin the critic's step; the policy's `train` waits for its end."""
        values = self.begin_compute("compute_values", batch.critic)
        log_probs = self.policy.begin_compute("compute_token_fields", batch.policy)
        needed = values + log_probs if self.config.algorithm.kl_coef > 0 else values
        return CriticStep(values + log_probs, self.begin_train(step, batch.critic, needed))
