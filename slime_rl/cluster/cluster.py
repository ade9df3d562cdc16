"""Everything a run starts, as one context: placement, train group, engines, router, rollout manager.

cluster.start()                 all at once; the first failure ends it
with cluster:                   leaving the block ends every process
    cluster.rollout · cluster.actor · cluster.save(step) · cluster.restore()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from slime_rl.cluster.checkpoint import find_checkpoint, read_meta, verify
from slime_rl.cluster.engines import EngineGroup
from slime_rl.cluster.load_checks import check_loadable
from slime_rl.cluster.placement import Placement
from slime_rl.cluster.saver import Saver
from slime_rl.cluster.train_group import TrainGroup
from slime_rl.config import Config

_CHECK_ALIVE_S = 5.0  # between looks at the engines while a rollout is waited for


class RolloutActor:
    """Holds the rollout manager in a Ray worker, so that the driver need not import torch and transformers."""

    def __init__(self, config: Config) -> None:
        from slime_rl.cluster.rollout_manager import RolloutManager

        self.manager = RolloutManager(config)

    async def call(self, method: str, *args: Any) -> Any:
        """One of the manager's coroutines."""
        return await getattr(self.manager, method)(*args)


class Rollout:
    """The driver's handle of the rollout manager: `rollout.take(step)` waits for the manager's `take`.

    While it waits it looks after the engines (`check_alive`), without which the answer would never come.
    """

    def __init__(self, config: Config) -> None:
        self.check_alive: Callable[[], None] | None = None  # set once engines serve
        self.actor: Any = ray.remote(RolloutActor).options(num_cpus=1).remote(config)

    def begin(self, method: str, *args: Any) -> Any:
        """Start a call and return its reference."""
        return self.actor.call.remote(method, *args)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._wait(self.begin(method, *args))

    def _wait(self, reference: Any) -> Any:
        while not ray.wait([reference], timeout=_CHECK_ALIVE_S)[0]:
            if self.check_alive is not None:
                self.check_alive()
        return ray.get(reference)


class Cluster:
    """Owns every process of the run; leaving the block ends them all."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engines: EngineGroup | None = None
        self.rollout: Any = None  # Rollout, once started
        self.actor: Any = None  # TrainGroup, once started
        self.saver: Any = None  # Saver, once started

    def start(self) -> None:
        """Start all parts at once; whatever has started is ended when one fails."""
        try:
            self._start()
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon()

    def _start(self) -> None:
        config = self.config
        placement = Placement(config)
        self.rollout = Rollout(config)
        pending = {"rollout": [self.rollout.begin("prepare")]}
        self.actor = TrainGroup(config, placement)
        self.saver = Saver(config, self.actor, self.rollout)
        if config.needs_engines:
            self.engines = EngineGroup(config, placement)
            pending["engines"] = self.engines.start()
        pending["trainers"] = self.actor.start()
        started = _wait_all(pending, config.cluster.start_timeout_s)
        self.actor.data_parallel_ranks = started["trainers"]
        if self.engines is not None:
            self.engines.connect(started["engines"])
            self.actor.connect_engines(self.engines.urls)
            self.rollout.check_alive = self.engines.check_alive
        self.rollout.connect(self.engines.router.url if self.engines else None)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the engines as `version`; nothing to do without engines."""
        return self.actor.sync_weights(version) if self.engines is not None else {}

    def save(self, step: int) -> None:
        """One checkpoint of model, optimizer, RNG and buffer after `step` finished steps."""
        self.saver.save(step)

    def checkpoint_step(self) -> int | None:
        """Finished steps of the checkpoint that the run continues; None when it begins."""
        options = self.config.checkpoint
        if options.load is None or options.finetune:
            return None
        return find_checkpoint(Path(options.load))[1].step

    def restore(self) -> int:
        """Continue from --load; returns the number of finished steps (0 without --load, and with --finetune).

        Raises:
            ValueError: no complete checkpoint there, a damaged one, or one of another model.
        """
        options = self.config.checkpoint
        if options.load is None:
            return 0
        folder = check_loadable(self.config)
        verify(folder)
        if options.finetune:
            self.actor.load_weights(str(folder / "model"))
            return 0
        self.actor.load(str(folder / "model"))
        step = read_meta(folder).step
        self.rollout.restore(str(folder / "buffer.json"), step)
        return step

    def abandon(self) -> None:
        """After a failure: actors may be busy for long, so they are not asked; all of them end with the Ray session."""
        if self.engines is not None:
            self.engines.router.stop()
        self.rollout = self.actor = self.engines = None

    def stop(self) -> None:
        """End engines, router and reward processes; Ray ends its own workers. Idempotent."""
        if self.rollout is not None:
            ray.wait([self.rollout.begin("close")], timeout=10)
        if self.actor is not None:
            self.actor.stop()
        if self.engines is not None:
            self.engines.stop()
        self.rollout = self.actor = self.engines = None


def _wait_all(pending: dict[str, list[Any]], timeout_s: float) -> dict[str, list[Any]]:
    """Results by part; raises the first failure as soon as it happens, or TimeoutError naming what is missing."""
    deadline = time.monotonic() + timeout_s
    waiting = {reference: part for part, references in pending.items() for reference in references}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            parts = sorted(set(waiting.values()))
            raise TimeoutError(f"{', '.join(parts)} did not start within --start-timeout-s {timeout_s:g}")
        for reference in done:
            ray.get(reference)
            del waiting[reference]
    return {part: ray.get(references) for part, references in pending.items()}
