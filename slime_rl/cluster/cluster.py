"""Everything a run starts, as one context: placement, train group, engines, router, rollout manager.

cluster.start()                 all at once; the first failure ends it
with cluster:                   leaving the block ends every process
    cluster.rollout · cluster.actor · cluster.critic · cluster.save(step) · cluster.restore()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from slime_rl.cluster.checkpoint import find_checkpoint, read_meta, verify
from slime_rl.cluster.engines import EngineGroup, other_engines, policy_engines
from slime_rl.cluster.errors import NoRestartLeft, TrainWorkerLost
from slime_rl.cluster.load_checks import check_loadable
from slime_rl.cluster.loop_watch import BLOCKED_FILE
from slime_rl.cluster.placement import Placement
from slime_rl.cluster.saver import Saver
from slime_rl.cluster.train_group import CriticGroup, TrainGroup
from slime_rl.config import Config
from slime_rl.engine.guard import EngineState, note_fault
from slime_rl.rollout.groups import reward_flag
from slime_rl.weight_sync.report import SyncReport

if TYPE_CHECKING:
    from slime_rl.weight_sync.memory import Action

_LOOK_AFTER_S = 1.0  # between looks at the engines while a rollout is waited for


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

    While it waits it looks after the engines, without which the answer might never come.
    """

    def __init__(self, config: Config) -> None:
        self.look_after: Callable[[], None] | None = None  # set once engines serve
        self.actor: Any = self._start(config)
        self._blocked = config.run_dir / "logs" / BLOCKED_FILE
        self._functions = f"{reward_flag(config)}, --generate-function-path {config.rollout.generate_function_path}"

    def _start(self, config: Config) -> Any:
        return ray.remote(RolloutActor).options(num_cpus=1).remote(config)

    def begin(self, method: str, *args: Any) -> Any:
        """Start a call and return its reference."""
        return self.actor.call.remote(method, *args)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self.wait(self.begin(method, *args))

    def has_ended(self, reference: Any) -> bool:
        """Whether a call of `begin` has its result."""
        return bool(ray.wait([reference], timeout=0)[0])

    def wait(self, reference: Any) -> Any:
        """The result of a call of `begin`; raises what it raised; TimeoutError when something blocked it."""
        while not ray.wait([reference], timeout=_LOOK_AFTER_S)[0]:
            if self.look_after is not None:
                self.look_after()
        try:
            return ray.get(reference)
        except RayActorError as error:
            if self._blocked.exists():
                raise TimeoutError(self._blocked.read_text()) from error
            raise RuntimeError(
                "the process that generates and scores has died: killed, out of memory, or ended by what runs in it "
                f"({self._functions}); see {self._blocked.parent}. Ray says: {str(error).splitlines()[0]}"
            ) from error


class Cluster:
    """Owns every process of the run; leaving the block ends them all."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engines: EngineGroup | None = None  # of the policy
        self.others: dict[str, EngineGroup] = {}  # of the models beside it, by name
        self.rollout: Any = None  # Rollout, once started
        self.actor: Any = None  # TrainGroup, once started
        self.critic: Any = None  # CriticGroup, once started, where the critic is not in the actor's workers
        self.saver: Any = None  # Saver, once started
        self.num_train_restarts = 0
        self._loaded: tuple[Path, int] | None = None  # checkpoint of --load, and its steps
        self._released: dict[str, set[str]] = {}  # memory that engines have given back, by URL
        self._served: int | None = None  # version that engines and trainer both have; None once they may differ
        self._held_back: int | None = None  # version that the trainer has and the engines, on purpose, do not

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
        self.actor = TrainGroup(config, placement.train, config.cluster.train_num_workers)
        if placement.critic is not None:
            self.critic = CriticGroup(config, placement.critic, self.actor)
        self.saver = Saver(config, self.actor, self.rollout, self.critic)
        if config.needs_engines:
            self.engines = policy_engines(config, placement)
            pending["engines"] = self.engines.start()
            self.others = other_engines(config, placement, self.engines)
            pending |= {f"engines of {name}": group.start() for name, group in self.others.items()}
        pending["trainers"] = self.actor.start()
        if self.critic is not None:
            pending["critics"] = self.critic.start()
        started = _wait_all(pending, config.cluster.start_timeout_s)
        self.actor.connect(started["trainers"])
        if self.critic is not None:
            self.critic.connect(started["critics"])
        if self.engines is not None:
            self.engines.connect(started["engines"])
            for name, group in self.others.items():
                group.connect(started[f"engines of {name}"])
            self.rollout.look_after = self._look_after
        beside = {name: group.router.url for name, group in self.others.items()}
        policy = config.served_models[0].name if config.router.share_router else None
        self.rollout.connect(self.engines.router.url if self.engines else None, beside, policy)

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer's turn. With --colocate the engines give back their memory and the trainer onloads; the engines'
        turn begins with the next `sync_weights`."""
        if self.config.cluster.colocate:
            self._take_devices()
        self._served = self._held_back = None
        yield

    def _take_devices(self) -> None:
        """Engines release, trainer onloads; nothing happens when it is so already."""
        if self.engines is not None:
            self._change_engine_memory("release", self.engines.updatable())
        self.actor.onload()

    def _change_engine_memory(self, action: Action, urls: list[str]) -> None:
        assert self.engines is not None
        self._released, failed = self.actor.change_engine_memory(action, urls, self._released)
        for url, reason in failed.items():
            self.engines.guard.report(url, f"did not change its memory: {reason}")

    def export(self, step: int) -> None:
        """The model after `step` finished steps as a Hugging Face folder."""
        if self.config.cluster.colocate:
            self._take_devices()
        self.saver.export(step)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the engines as `version`; nothing to do without engines.

        Engines that are lost meanwhile are left to the guard; returns when at least one has the weights.
        """
        if self.engines is None:
            return {}
        if self._released:
            self._change_engine_memory("resume_weights", list(self._released))
        while True:
            report = self._send(self.engines, version, self._wait_for_engine(self.engines))
            if report.updated:
                self._served, self._held_back = version, None
                if self.config.cluster.colocate:
                    self.actor.offload()
                    self._change_engine_memory("resume_rest", list(self._released))
                return {
                    "sync/seconds": report.seconds,
                    "sync/bytes": float(report.num_bytes),
                    "sync/changed_share": report.changed_share,
                }

    def hold_back(self, version: int) -> None:
        """The engines keep their weights for now, although the trainer has those of `version`.

        An engine that is restarted meanwhile cannot get the old ones any more; then all of them get `version`.
        """
        self._held_back = version

    def _send(self, engines: EngineGroup, version: int, urls: list[str]) -> SyncReport:
        report = self.actor.sync_weights(version, urls)
        engines.settle(version, report.updated, report.failed)
        return report

    def _wait_for_engine(self, engines: EngineGroup) -> list[str]:
        """URLs of the engines to update; waits while every one of them is being restarted."""
        while True:
            engines.guard.check()
            urls = engines.updatable()
            if urls:
                return urls
            time.sleep(_LOOK_AFTER_S)

    def _look_after(self) -> None:
        """While a rollout is waited for: end the run when the guard says so, and bring restarted engines up to date
        while the trainer, which has nothing to do now, still has the weights that the others serve."""
        engines = self.engines
        assert engines is not None
        self.saver.poll()
        for group in (engines, *self.others.values()):
            group.guard.check()
        if not (stale := engines.guard.urls(EngineState.STALE)):
            return
        if self._held_back is not None:
            self.sync_weights(self._held_back)
        elif self._served is None:
            return
        elif self.config.cluster.colocate:  # the trainer needs the devices to send, so all engines make room
            version = self._served
            self._take_devices()
            self.sync_weights(version)
        else:
            self._send(engines, self._served, stale)

    def restart_trainers(self, error: TrainWorkerLost) -> int:
        """Build the train groups anew after a loss and go back to the newest checkpoint; returns its finished steps.

        The buffer goes back with it: what was generated since then is generated again.

        Raises:
            NoRestartLeft: --max-restarts is used up.
            TrainWorkerLost: another one was lost meanwhile, or Ray has had no place for them.
        """
        self.saver.give_up()
        limit = self.config.cluster.max_restarts
        if self.num_train_restarts >= limit:
            raise NoRestartLeft(f"{error}; --max-restarts {limit} allows no further restart") from error
        self.num_train_restarts += 1
        note_fault(self.config.run_dir, f"{error}; restarting the train group")
        self._served = self._held_back = None
        self.rollout.halt()
        for group in self._groups:
            group.restart()
        if self.config.cluster.colocate:
            self._take_devices()
        folder, step = self.saver.newest or self._loaded or (None, 0)
        if folder is not None:
            self._load(folder)
        elif self.config.checkpoint.load is not None:  # --finetune
            self.actor.load_weights(str(check_loadable(self.config) / "model"))
        self.rollout.restore(None if folder is None else str(folder / "buffer.json"), step)
        note_fault(self.config.run_dir, f"the train group goes on after step {step} (the newest checkpoint)")
        return step

    @property
    def _groups(self) -> list[Any]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def _load(self, folder: Path) -> None:
        for group in self._groups:
            group.load(str(folder / "model"))

    def fault_metrics(self) -> dict[str, float]:
        """Restarts so far, and how many engines are in which state now."""
        counts = {"faults/train_restarts": float(self.num_train_restarts)}
        guards = [group.guard for group in self._all_engines()]
        if guards:
            for what in ("engine", "router"):
                counts[f"faults/{what}_restarts"] = float(sum(guard.num_restarts[what] for guard in guards))
            counts["faults/slow_engines"] = float(sum(guard.num_slow for guard in guards))
            for state in EngineState:
                counts[f"engines/{state}"] = float(sum(len(guard.urls(state)) for guard in guards))
        return counts

    def save(self, step: int) -> None:
        """One checkpoint of model, optimizer, RNG and buffer after `step` finished steps."""
        if self.config.cluster.colocate:  # a run that is left while engines generate has them on the devices
            self._take_devices()
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
        self._load(folder)
        step = read_meta(folder).step
        self.rollout.restore(str(folder / "buffer.json"), step)
        self._loaded = (folder, step)
        return step

    def abandon(self) -> None:
        """After a failure: actors may be busy for long, so they are not asked; all of them end with the Ray session."""
        for group in self._all_engines():
            group.abandon()
        self.rollout = self.actor = self.critic = self.engines = None
        self.others = {}

    def _all_engines(self) -> list[EngineGroup]:
        return [group for group in (self.engines, *self.others.values()) if group is not None]

    def stop(self) -> None:
        """End engines, router and reward processes; Ray ends its own workers. Idempotent."""
        if self.rollout is not None:
            ray.wait([self.rollout.begin("close")], timeout=10)
        if self.actor is not None:
            self.actor.stop()
        for group in self._all_engines():
            group.stop()
        self.rollout = self.actor = self.critic = self.engines = None
        self.others = {}


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
