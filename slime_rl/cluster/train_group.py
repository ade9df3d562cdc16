"""The training side: one Ray actor per Megatron worker, called together because their collectives must meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from slime_rl.cluster.placement import Placement
from slime_rl.config import Config

if TYPE_CHECKING:
    from slime_rl.weight_sync.sender import WeightSender


class TrainActor:
    """One Megatron worker. Heavy imports wait until `start`, so that placing and addressing are quick."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config, self.rank = config, rank
        self.sender: WeightSender | None = None  # in rank 0, once engines are connected

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port for the workers' process group; asked of rank 0."""
        from slime_rl.engine.ports import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, address: str, port: int) -> int:
        """Build model and optimizer; returns this worker's data-parallel rank."""
        from slime_rl.trainer.worker import TrainWorker

        self.worker = TrainWorker(self.config, self.rank, self.config.cluster.train_num_workers, address, port)
        return self.worker.data_parallel_rank

    def train(self, step: int, batch: Any) -> dict[str, float]:
        return self.worker.train(step, batch)

    def connect_engines(self, urls: list[str]) -> None:
        from slime_rl.weight_sync.sender import make_sender

        if self.rank == 0:
            self.sender = make_sender(self.config, urls)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the current weights to every engine as `version`. All workers take part; rank 0 sends."""
        from slime_rl.weight_sync.bucket import split_buckets, tied_names

        stream = self.worker.export_weights()
        if self.sender is None:
            for _ in stream:  # gathering is collective
                pass
            return {}
        limit = self.config.weight_sync.weight_sync_bucket_bytes
        buckets = split_buckets(stream, limit, skip=tied_names(self.config.model.hf_checkpoint))
        with self.worker.state.trace.span("steps", f"send weights {version}"):
            report = self.sender.send(buckets, version)
        return {"sync/seconds": report.seconds, "sync/bytes": float(report.num_bytes)}

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
    """Calls every worker and waits for all; the first failure is raised with the worker's own traceback."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self.actors: list[Any] = [
            ray.remote(TrainActor).options(**placement.train_options(rank)).remote(config, rank)
            for rank in range(config.cluster.train_num_workers)
        ]
        self.data_parallel_ranks: list[int] = []

    def start(self) -> list[Any]:
        """Begin building the workers; the returned references resolve to their data-parallel ranks."""
        address, port = ray.get(self.actors[0].rendezvous.remote())
        return [actor.start.remote(address, port) for actor in self.actors]

    def connect_engines(self, urls: list[str]) -> None:
        self._all("connect_engines", urls)

    def train(self, step: int, shards: list[Any]) -> dict[str, float]:
        """Train on a step; `shards` holds one batch reference per data-parallel rank."""
        calls = [
            actor.train.remote(step, shards[rank])
            for actor, rank in zip(self.actors, self.data_parallel_ranks, strict=True)
        ]
        return ray.get(calls)[0]

    def sync_weights(self, version: int) -> dict[str, float]:
        return self._all("sync_weights", version)[0]

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
        return ray.get([getattr(actor, method).remote(*args) for actor in self.actors])
