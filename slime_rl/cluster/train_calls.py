"""Waiting for calls of Megatron workers, which meet in collectives: one failure must not leave the driver waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime_rl.cluster.errors import TrainWorkerLost, root_cause
from slime_rl.cluster.pulse import Pulse
from slime_rl.config import Config

_LOSS_SHOWS_S = 3.0
_FEEL_PULSE_S = 5.0


@dataclass(frozen=True)
class Call:
    """A call under way."""

    who: str  # "train worker 0"
    reference: Any
    pulse: Pulse | None  # None until the worker has started


def collect(calls: list[Call], config: Config) -> list[Any]:
    """Results in the order of the calls.

    When a worker is lost the others' collectives fail too, often before Ray tells of the loss: so after a failure
    the others get a moment, and a loss counts first.

    Raises:
        TrainWorkerLost: the process of a worker has ended or stands still; names the worker.
    """
    references = [call.reference for call in calls]
    try:
        _wait(calls, config)
        return ray.get(references)
    except (RayTaskError, RayActorError) as error:
        first = error
    if isinstance(root_cause(first), ValueError):
        raise first  # a worker's own words; nobody was lost
    ready, _ = ray.wait(references, num_returns=len(references), timeout=_LOSS_SHOWS_S)
    for call in calls:
        if call.reference in ready and _has_died(call):
            raise _lost(call, "has died (killed, or out of memory)", config) from first
    raise first


def _wait(calls: list[Call], config: Config) -> None:
    """Until one call has failed or all are done."""
    waiting, timeout_s = [call.reference for call in calls], config.cluster.train_health_timeout_s
    beaten = time.monotonic()
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=min(_FEEL_PULSE_S, timeout_s / 4))
        ray.get(ready)
        if ready:
            continue
        still = [call for call in calls if call.pulse is not None and not call.pulse.beats(timeout_s / 4)]
        if not still:
            beaten = time.monotonic()
        elif time.monotonic() - beaten > timeout_s and not ray.wait(waiting, timeout=0)[0]:
            raise _lost(still[0], f"has stood still for {timeout_s:g} s (--train-health-timeout-s)", config)


def _lost(call: Call, what: str, config: Config) -> TrainWorkerLost:
    return TrainWorkerLost(f"{call.who} {what}; see {config.run_dir}/logs")


def _has_died(call: Call) -> bool:
    """Whether its own process did. A worker that was waiting for a dead one's result fails with an error of its own."""
    try:
        ray.get(call.reference)
    except RayTaskError:
        return False
    except RayActorError:
        return True
    return False
