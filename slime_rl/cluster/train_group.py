"""The training side: one Ray actor per Megatron worker, called together because their collectives must meet."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_rl.cluster.errors import TrainWorkerLost, root_cause
from slime_rl.cluster.placement import Placement
from slime_rl.cluster.pulse import Pulse, end_process, start_pulse
from slime_rl.config import Config

_LOSS_SHOWS_S = 3.0
_FEEL_PULSE_S = 5.0

if TYPE_CHECKING:
    from slime_rl.weight_sync.memory import Action
    from slime_rl.weight_sync.report import SyncReport
    from slime_rl.weight_sync.sender import WeightSender


class TrainActor:
    """One Megatron worker. Heavy imports wait until `start`, so that placing and addressing are quick."""

    def __init__(self, config: Config, rank: int, gpu: int | None) -> None:
        self.config, self.rank, self.gpu = config, rank, gpu
        self.sender: WeightSender | None = None  # in rank 0, once weights were sent

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port for the workers' process group; asked of rank 0."""
        from slime_rl.engine.ports import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, address: str, port: int) -> tuple[int, Pulse]:
        """Build model and optimizer; returns this worker's data-parallel rank and its pulse."""
        if self.gpu is not None:  # before torch is imported; it is then the only one, number 0
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        from slime_rl.trainer.worker import TrainWorker

        self.address = address
        self.worker = TrainWorker(self.config, self.rank, self.config.cluster.train_num_workers, address, port)
        node_id = ray.get_runtime_context().get_node_id()
        return self.worker.data_parallel_rank, start_pulse(ray.util.get_node_ip_address(), node_id)

    def train(self, step: int, batch: Any) -> dict[str, float]:
        return self.worker.train(step, batch)

    def sync_weights(self, version: int, urls: list[str]) -> SyncReport | None:
        """Send the current weights to these engines as `version`. All workers take part; rank 0 sends and reports."""
        from slime_rl.weight_sync.bucket import split_buckets, tied_names
        from slime_rl.weight_sync.sender import make_sender

        stream = self.worker.export_weights()
        if self.rank != 0:
            for _ in stream:  # gathering is collective
                pass
            return None
        if self.sender is None:
            self.sender = make_sender(self.config, urls, host=self.address)
        self.sender.connect(urls)
        limit = self.config.weight_sync.bucket_bytes(self.config.cluster.device)
        buckets = split_buckets(stream, limit, skip=tied_names(self.config.model.hf_checkpoint))
        with self.worker.state.trace.span("steps", f"send weights {version}"):
            return self.sender.send(buckets, version)

    def change_engine_memory(
        self, action: Action, urls: list[str], released: dict[str, set[str]]
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """See weight_sync.memory; (what is released now, engines that failed). Here because it needs torch."""
        from slime_rl.weight_sync.memory import EngineMemory

        cluster = self.config.cluster
        on_cuda, shards = cluster.device == "cuda", cluster.rollout_num_gpus_per_engine
        headers = self.config.engine.authorization
        memory = EngineMemory(on_cuda=on_cuda, num_shards=shards, released=released, headers=headers)
        memory.change(action, urls)
        return memory.released, memory.failed

    def offload(self) -> None:
        self.worker.offload()

    def onload(self) -> None:
        self.worker.onload()

    def close(self) -> None:
        """Give back what the weight sync shares with the engines."""
        if self.sender is not None:
            self.sender.close()

    def save(self, path: str, step: int) -> None:
        self.worker.save(path, step, {})

    def begin_save(self, path: str, step: int) -> None:
        self.worker.begin_save(path, step, {})

    def save_is_written(self) -> bool:
        return self.worker.save_is_written()

    def finish_save(self) -> None:
        self.worker.finish_save()

    def load(self, path: str) -> None:
        self.worker.load(path)

    def load_weights(self, path: str) -> None:
        self.worker.load_weights(path)

    def save_hf(self, path: str) -> None:
        self.worker.save_hf(path)


class TrainGroup:
    """Calls every worker and waits for all; the first failure is raised with the worker's own traceback.

    Every call raises TrainWorkerLost, naming the worker, when the process of one has ended or stands still.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        self.config, self.placement = config, placement
        self.data_parallel_ranks: list[int] = []
        self.pulses: list[Pulse] = []
        self.actors = self._make([self.placement.train_gpu(rank) for rank in self._ranks])

    @property
    def _ranks(self) -> range:
        return range(self.config.cluster.train_num_workers)

    def _make(self, gpus: list[int | None]) -> list[Any]:
        return [
            ray.remote(TrainActor).options(**self.placement.train_options(rank)).remote(self.config, rank, gpus[rank])
            for rank in self._ranks
        ]

    def _present_gpus(self) -> list[int | None]:
        """Of every worker, where its bundle is now."""
        first = [(self.placement.train_options(rank), self.placement.train_gpu(rank)) for rank in self._ranks]
        present = self.placement.present_gpus([(options, () if gpu is None else (gpu,)) for options, gpu in first])
        return [gpus[0] if gpus else None for gpus in present]

    def start(self) -> list[Any]:
        """Begin building the workers; what the returned references resolve to is for `connect`."""
        address, port = ray.get(self.actors[0].rendezvous.remote())
        return [actor.start.remote(address, port) for actor in self.actors]

    def connect(self, started: list[tuple[int, Pulse]]) -> None:
        """Take note of the started workers' data-parallel ranks and pulses."""
        self.data_parallel_ranks = [rank for rank, _ in started]
        self.pulses = [pulse for _, pulse in started]

    def restart(self) -> None:
        """End every worker and build new ones, with the weights of --hf-checkpoint and a fresh optimizer."""
        for actor in self.actors:
            ray.kill(actor)
        for pulse in self.pulses:  # Ray does not end a stopped process
            on_its_node = NodeAffinitySchedulingStrategy(pulse.node_id, soft=True)
            ray.get(ray.remote(end_process).options(num_cpus=0, scheduling_strategy=on_its_node).remote(pulse.pid))
        self.pulses = []
        self.actors = self._make(self._present_gpus())
        self.connect(self._collect(self.start()))

    def train(self, step: int, shards: list[Any]) -> dict[str, float]:
        """Train on a step; `shards` holds one batch reference per data-parallel rank."""
        calls = [
            actor.train.remote(step, shards[rank])
            for actor, rank in zip(self.actors, self.data_parallel_ranks, strict=True)
        ]
        return self._collect(calls)[0]

    def sync_weights(self, version: int, urls: list[str]) -> SyncReport:
        return self._all("sync_weights", version, urls)[0]

    def change_engine_memory(
        self, action: Action, urls: list[str], released: dict[str, set[str]]
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """See TrainActor.change_engine_memory; done by rank 0."""
        return self._collect([self.actors[0].change_engine_memory.remote(action, urls, released)])[0]

    def offload(self) -> None:
        """Move weights, gradients and optimizer state off the devices."""
        self._all("offload")

    def onload(self) -> None:
        self._all("onload")

    def save(self, path: str, step: int) -> None:
        self._all("save", path, step)

    def begin_save(self, path: str, step: int) -> None:
        """Plan a checkpoint and let the workers write it; `finish_save` makes it whole."""
        self._all("begin_save", path, step)

    def save_is_written(self) -> bool:
        return all(self._all("save_is_written"))

    def finish_save(self) -> None:
        self._all("finish_save")

    def load(self, path: str) -> None:
        self._all("load", path)

    def load_weights(self, path: str) -> None:
        self._all("load_weights", path)

    def save_hf(self, path: str) -> None:
        self._all("save_hf", path)

    def stop(self) -> None:
        """Let every worker give back what outlives its process."""
        ray.wait([actor.close.remote() for actor in self.actors], num_returns=len(self.actors), timeout=10)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._collect([getattr(actor, method).remote(*args) for actor in self.actors])

    def _collect(self, calls: list[Any]) -> list[Any]:
        """Results by rank.

        When a worker is lost the others' collectives fail too, often before Ray tells of the loss: so after a failure
        the others get a moment, and a loss counts first.
        """
        try:
            self._wait(calls)
            return ray.get(calls)
        except (RayTaskError, RayActorError) as error:
            first = error
        if isinstance(root_cause(first), ValueError):
            raise first  # a worker's own words; nobody was lost
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=_LOSS_SHOWS_S)
        for rank, call in enumerate(calls):
            if call in ready and isinstance(_outcome(call), RayActorError):
                raise self._lost(rank, "has died (killed, or out of memory)") from first
        raise first

    def _wait(self, calls: list[Any]) -> None:
        """Until one call has failed or all are done."""
        waiting, timeout_s = list(calls), self.config.cluster.train_health_timeout_s
        beaten = time.monotonic()
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=min(_FEEL_PULSE_S, timeout_s / 4))
            ray.get(ready)
            if ready:
                continue
            still = [rank for rank, pulse in enumerate(self.pulses) if not pulse.beats(timeout_s / 4)]
            if not still:
                beaten = time.monotonic()
            elif time.monotonic() - beaten > timeout_s and not ray.wait(waiting, timeout=0)[0]:
                raise self._lost(still[0], f"has stood still for {timeout_s:g} s (--train-health-timeout-s)")

    def _lost(self, rank: int, what: str) -> TrainWorkerLost:
        return TrainWorkerLost(f"train worker {rank} {what}; see {self.config.run_dir}/logs")


def _outcome(call: Any) -> Exception | None:
    try:
        ray.get(call)
    except (RayTaskError, RayActorError) as error:
        return error
    return None
