"""A tracker that may be slow or away, in a thread of its own: neither keeps a run waiting, nor ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

CLOSE_TIMEOUT_S = 300.0  # uploads after a long run take a while; a server that is away would hold the run for good
logger = logging.getLogger(__name__)


class InBackground:
    """Opens a tracker, logs to it and closes it, all in one thread and in order.

    What it raises on opening is raised here. Later failures are told once and counted: the metrics of a run are in
    metrics.jsonl in any case, so a server that is down for an hour must not cost the run.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        """`name` is the one in --trackers; `make` opens the tracker, which has `run_id`, `log` and `close`."""
        self._name = name
        self._queue: SimpleQueue[tuple[int, Mapping[str, float]] | bool] = SimpleQueue()
        self._opened: Future[str] = Future()
        self._logged = self._lost = 0
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self.run_id = self._opened.result()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put((step, dict(metrics)))

    def close(self, failed: bool = False, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until everything has arrived, but no longer than `timeout_s`."""
        self._queue.put(failed)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "--trackers %s: not done after %g s; what it lacks is in metrics.jsonl", self._name, timeout_s
            )
        elif self._lost:
            logger.warning("--trackers %s: did not take %d of %d lines", self._name, self._lost, self._logged)

    def _work(self, make: Callable[[], Any]) -> None:
        try:
            tracker = make()
        except BaseException as error:  # raised again where the run opens it
            self._opened.set_exception(error)
            return
        self._opened.set_result(tracker.run_id)
        while isinstance(item := self._queue.get(), tuple):
            self._logged += 1
            self._try(f"step {item[0]}", tracker.log, *item)
        self._try("the end of the run", tracker.close, item)

    def _try(self, what: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # each package has kinds of its own
            if self._lost == 0:
                told = "--trackers %s: %s was not taken; the run goes on, and metrics.jsonl has it: %s"
                logger.warning(told, self._name, what, error)
            self._lost += 1
