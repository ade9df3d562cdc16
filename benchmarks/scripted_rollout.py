"""A scripted engine and a clock that jumps, to run the real buffer and the real rollout code for hours in seconds.

`ScriptedClient` takes the place of the HTTP client: it samples one token every `token_s` seconds in each of its slots,
knows which weights it serves at any time, and hears of aborts. `run_virtual` runs a coroutine on an event loop whose
clock jumps to the next timer whenever there is nothing left to do.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config, parse_config
from slime_rl.rollout.client import EngineClient, Generation
from slime_rl.rollout.continuous import ContinuousProduction
from slime_rl.rollout.group_loop import group_loop
from slime_rl.rollout.runtime import RolloutRuntime, use_runtime
from slime_rl.rollout.scope import SampleScope
from slime_rl.rollout.stepped import SteppedProduction
from slime_rl.types import Group, Sample

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: it tells the loop's clock how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("virtual time stands still: every task waits for something that no timer brings")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class ScriptedClient(EngineClient):
    """`length_of(prompt)` is the whole length `[R]` that the next response to `prompt` will have."""

    def __init__(self, length_of: Callable[[list[int]], int], *, slots: int, token_s: float = 1.0) -> None:
        super().__init__("http://scripted", max_in_flight=slots, timeout_s=1e9)
        self.length_of, self.token_s = length_of, token_s
        self.served: list[tuple[float, int]] = [(0.0, 0)]  # (from when on, version)
        self.num_tokens = self.num_aborted = self.most_running = 0
        self._aborts: dict[str, asyncio.Event] = {}

    def serve(self, version: int) -> None:
        """New weights from now on, also for requests in flight."""
        self.served.append((asyncio.get_running_loop().time(), version))

    async def _generate(
        self, scope: SampleScope, input_ids: list[int], sampling_params: dict[str, Any], routing_key: str | None
    ) -> Generation:
        whole = min(self.length_of(input_ids), sampling_params["max_new_tokens"])
        loop, aborted, request_id = asyncio.get_running_loop(), asyncio.Event(), uuid.uuid4().hex
        self._aborts[request_id] = aborted
        scope.requests.add(request_id)
        self.most_running = max(self.most_running, len(self._aborts))
        begin = loop.time()
        try:
            async with asyncio.timeout(whole * self.token_s):
                await aborted.wait()
        except TimeoutError:
            pass
        finally:
            del self._aborts[request_id]
            scope.requests.discard(request_id)
        n = whole if not aborted.is_set() else min(whole, int((loop.time() - begin) / self.token_s))
        self.num_tokens += n
        self.num_aborted += aborted.is_set()
        versions = self._versions([begin + (i + 0.5) * self.token_s for i in range(n)])
        reason = "abort" if aborted.is_set() else "stop"
        return Generation(
            tokens=[7] * n,
            log_probs=[-0.5] * n,
            versions=versions,
            text="x" * n,
            finish_reason=reason,
            num_cached_tokens=0,
        )

    def _versions(self, times: list[float]) -> list[int]:
        """The version served at each of these rising times."""
        at, found = 0, []
        for time in times:
            while at + 1 < len(self.served) and self.served[at + 1][0] <= time:
                at += 1
            found.append(self.served[at][1])
        return found

    async def abort(self, request_ids: Any) -> None:
        for request_id in request_ids:
            if request_id in self._aborts:
                self._aborts[request_id].set()


class CharTokenizer:
    """One token per character; enough for a scripted engine."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


async def scripted_reward(config: Config, group: list[Sample]) -> list[float]:
    """Differs within a group, and depends on the samples' numbers alone."""
    return [float(sample.index % 2) for sample in group]


def scripted_config(folder: Path, num_prompts: int, *flags: str) -> Config:
    """A Config whose prompts are `prompt 0`, `prompt 1`, … and whose reward is `scripted_reward`."""
    (folder / "config.json").write_text("{}")
    rows = [{"prompt": f"prompt {i}", "label": str(i)} for i in range(num_prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse_config(
        [
            *("--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl"), "--no-shuffle"),
            *("--run-dir", str(folder / "run"), "--no-apply-chat-template", "--group-timeout-s", "1e9"),
            *("--reward-function-path", "benchmarks.scripted_rollout:scripted_reward", *flags),
        ]
    )


class ScriptedRun:
    """The main loop's order of calls: submit, take, train, commit, new weights."""

    def __init__(self, config: Config, length_of: Callable[[list[int]], int], train_s: float = 30.0) -> None:
        self.config, self.train_s = config, train_s
        slots = config.rollout.rollout_concurrency * config.cluster.rollout_num_engines
        self.client = ScriptedClient(length_of, slots=slots)
        self.buffer = LedgerBuffer(config, FilePromptSource(config))
        self.batches: list[list[Group]] = []
        self.metrics: list[dict[str, float]] = []
        self.ends_s: list[float] = []  # when each step had trained
        self.state: Any = None

    async def run(self, start: int = 0, steps: int | None = None) -> ScriptedRun:
        end = self.config.train.num_steps if steps is None else start + steps
        try:
            with use_runtime(RolloutRuntime(client=self.client, tokenizer=CharTokenizer())):
                production: Any
                if self.config.asynchrony.is_continuous:
                    production = ContinuousProduction(self.config, self.buffer, start)
                else:
                    production = SteppedProduction(self.config, self.buffer, group_loop, start)
                try:
                    await self._loop(production, start, end)
                finally:
                    await production.close()
        finally:
            await self.client.close()
        return self

    async def _loop(self, production: Any, start: int, end: int) -> None:
        for step in range(start, end):
            production.submit_through(step + self.config.rollout.rollout_ahead)
            async with asyncio.timeout(1e6):
                output = await production.take(step)
            self.batches.append(output.groups)
            self.metrics.append(output.metrics)
            await asyncio.sleep(self.train_s)
            self.buffer.commit(step)
            self.client.serve(step + 1)
            production.weights_are(step + 1)
            self.ends_s.append(asyncio.get_running_loop().time())
            if step + 1 == end:
                self.state = self.buffer.state_dict()

    def ages(self) -> list[int]:
        """Of the oldest trained token of each step."""
        oldest = [
            min(version for group in groups if (version := group.oldest_version) is not None) for groups in self.batches
        ]
        return [step - version for step, version in enumerate(oldest)]
