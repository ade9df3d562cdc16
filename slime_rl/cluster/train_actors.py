"""The Ray actors of the train groups: a Megatron worker each. Heavy imports wait until `start`, so that placing and
addressing are quick."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import ray

from slime_rl.cluster.pulse import Pulse, start_pulse
from slime_rl.config import Config

if TYPE_CHECKING:
    from slime_rl.trainer.member import GroupMember
    from slime_rl.trainer.token_log import TokenLog
    from slime_rl.weight_sync.memory import Action
    from slime_rl.weight_sync.quantize import EngineForm
    from slime_rl.weight_sync.report import SyncReport
    from slime_rl.weight_sync.sender import WeightSender


class MegatronActor:
    """What the workers of every train group can do."""

    def __init__(self, config: Config, rank: int, world_size: int, gpu: int | None) -> None:
        self.config, self.rank, self.world_size, self.gpu = config, rank, world_size, gpu
        self.worker: Any = None

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port for the workers' process group; asked of rank 0."""
        from slime_rl.engine.ports import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, address: str, port: int) -> tuple[int, Pulse]:
        """Build model and optimizer; returns this worker's data-parallel rank and its pulse."""
        if self.gpu is not None:  # before torch is imported; it is then the only one, number 0
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        self.address = address
        self.worker = self.make_worker(port)
        gc.collect()
        gc.freeze()  # Megatron collects garbage in every save: a walk of 0.2 s over all that was imported
        node_id = ray.get_runtime_context().get_node_id()
        return self.worker.data_parallel_rank, start_pulse(ray.util.get_node_ip_address(), node_id)

    def make_worker(self, port: int) -> GroupMember:
        raise NotImplementedError

    def train(self, step: int, batch: Any, given: list[Any]) -> dict[str, float]:
        """`given` are references of what other workers compute for this step; they are waited for here, so that a loss
        over there is not taken for one of this worker."""
        return self.worker.train(step, batch, ray.get(given))

    def compute(self, method: str, batch: Any) -> Any:
        """The worker's `compute_token_fields` or `compute_values` of a batch."""
        return getattr(self.worker, method)(batch)

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


class CriticActor(MegatronActor):
    """One worker of a critic that has its own train group."""

    def make_worker(self, port: int) -> GroupMember:
        from slime_rl.trainer.critic_worker import CriticWorker

        return CriticWorker(self.config, self.rank, self.world_size, self.address, port)


class TrainActor(MegatronActor):
    """One worker of the policy."""

    def __init__(self, config: Config, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(config, rank, world_size, gpu)
        self.sender: WeightSender | None = None  # in rank 0, once weights were sent
        self.engine_form: EngineForm | None = None  # the same

    def make_worker(self, port: int) -> GroupMember:
        from slime_rl.trainer.worker import TrainWorker

        return TrainWorker(self.config, self.rank, self.world_size, self.address, port)

    def sync_weights(self, version: int, urls: list[str]) -> SyncReport | None:
        """Send the current weights to these engines as `version`. All workers take part; rank 0 sends and reports."""
        from slime_rl.weight_sync.bucket import split_buckets, tied_names
        from slime_rl.weight_sync.quantize import EngineForm
        from slime_rl.weight_sync.sender import make_sender

        stream = self.worker.export_weights()
        if self.rank != 0:
            for _ in stream:  # gathering is collective
                pass
            return None
        if self.sender is None:
            self.engine_form = EngineForm(self.config.model.hf_checkpoint)
            self.sender = make_sender(self.config, urls, host=self.address)
        self.sender.connect(urls)
        limit = self.config.weight_sync.bucket_bytes(self.config.cluster.device)
        assert self.engine_form is not None
        buckets = split_buckets(self.engine_form.of(stream), limit, skip=tied_names(self.config.model.hf_checkpoint))
        try:
            with self.worker.state.trace.span("steps", f"send weights {version}"):
                return self.sender.send(buckets, version)
        finally:
            for _ in stream:  # after an error between gathering and sending: the other workers still gather
                pass

    def change_engine_memory(
        self, action: Action, urls: list[str], released: dict[str, set[str]]
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """See weight_sync.memory; (what is released now, engines that failed). Here because it needs torch."""
        from slime_rl.weight_sync.memory import EngineMemory

        on_cuda, headers = self.config.cluster.device == "cuda", self.config.engine.authorization
        memory = EngineMemory(on_cuda=on_cuda, released=released, headers=headers)
        memory.change(action, urls)
        return memory.released, memory.failed

    def token_log(self) -> TokenLog:
        return self.worker.token_log()

    def offload(self) -> None:
        self.worker.offload()

    def onload(self) -> None:
        self.worker.onload()

    def close(self) -> None:
        """Give back what the weight sync shares with the engines."""
        if self.sender is not None:
            self.sender.close()

    def load_weights(self, path: str) -> None:
        self.worker.load_weights(path)

    def save_hf(self, path: str) -> None:
        self.worker.save_hf(path)
