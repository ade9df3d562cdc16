"""The rollout side's processes: one Ray actor per SGLang server, and the router that the driver owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from slime_rl.cluster.placement import Placement
from slime_rl.config import Config
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer


class EngineActor:
    """Runs in its own Ray worker; the server below it lives in a process group that dies with this worker."""

    def __init__(self, config: Config, index: int, run_dir: str) -> None:
        self.server = EngineServer(config, index, Path(run_dir))

    def start(self) -> str:
        """Start the server, wait until it is healthy, return its URL."""
        self.server.start()
        return self.server.url

    def is_alive(self) -> bool:
        return self.server.is_alive()

    def stop(self) -> None:
        self.server.stop()


class EngineGroup:
    """All engines and the router in front of them."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self.urls: list[str] = []
        self.router = RouterProcess(config, config.run_dir)
        self.actors: list[Any] = [
            ray.remote(EngineActor)
            .options(**placement.engine_options(index))
            .remote(config, index, str(config.run_dir))
            for index in range(config.cluster.rollout_num_engines)
        ]

    def start(self) -> list[Any]:
        """Begin starting; the returned references resolve to the engines' URLs."""
        self.router.start()
        return [actor.start.remote() for actor in self.actors]

    def connect(self, urls: list[str]) -> None:
        """Put the started engines behind the router."""
        self.urls = urls
        for url in urls:
            self.router.add_worker(url)

    def check_alive(self) -> None:
        """Raise RuntimeError when the router or an engine has ended; names its log."""
        if not self.router.is_alive():
            raise RuntimeError(f"the router has died; see {self.router.log_path}")
        for index, alive in enumerate(ray.get([actor.is_alive.remote() for actor in self.actors])):
            if not alive:
                raise RuntimeError(f"engine {index} has died; see {self.router.log_path.parent}/engine_{index}.log")

    def stop(self) -> None:
        ray.wait([actor.stop.remote() for actor in self.actors], num_returns=len(self.actors), timeout=20)
        self.router.stop()
