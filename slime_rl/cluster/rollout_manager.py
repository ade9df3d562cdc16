"""The rollout side's brain, one Ray actor: owns buffer, prompt source, rollout tasks and evaluation.

submit_through(s), weights_are(v) ──► production ──► take(s): a batch per data-parallel rank, and metrics
                                                      commit(s): the optimizer has used it

Production is SteppedProduction (synchronous, --rollout-ahead) or ContinuousProduction (--fully-async with
--max-staleness > 0).
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slime_rl.buffer.dumps import RolloutDumps, open_dumps
from slime_rl.buffer.opening import open_buffer
from slime_rl.cluster.loop_watch import BLOCKED_FILE, watch_loop
from slime_rl.cluster.train_group import StepBatch
from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch, rollout_batch_from_groups, split_for_data_parallel
from slime_rl.data.rendering import load_tokenizer, token_texts
from slime_rl.data.state_files import load_state, save_state
from slime_rl.engine.parsers import SglangParser
from slime_rl.observability.drops import DropMetrics
from slime_rl.observability.metrics import summarise_samples
from slime_rl.observability.trace import open_trace
from slime_rl.observability.tracker import MAX_LOGGED_TOKENS
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.agent.black_box import load_agent
from slime_rl.rollout.agent.environments import load_environment
from slime_rl.rollout.agent.gateway.server import Gateway
from slime_rl.rollout.agent.parsing import NEED_PARSER, TurnParser
from slime_rl.rollout.client import EngineClient
from slime_rl.rollout.continuous import ContinuousProduction
from slime_rl.rollout.evaluation import Evaluator
from slime_rl.rollout.extra_metrics import LOG_FUNCTIONS, extra_metrics
from slime_rl.rollout.group_loop import ROLLOUT_FUNCTIONS, rollout_function_name
from slime_rl.rollout.groups import GroupRunner, encode_prompt
from slime_rl.rollout.lengths import LengthHistory
from slime_rl.rollout.rewards import FENCED_MODULES
from slime_rl.rollout.rewards.fence import ProcessFence, use_fence
from slime_rl.rollout.runtime import RolloutRuntime, freeze_heap, use_runtime
from slime_rl.rollout.stepped import SteppedProduction
from slime_rl.types import Prompt, Sample

Production = SteppedProduction | ContinuousProduction
OLD_AGE = 8  # tokens of this age and more are counted together
LENGTHS_FILE = "lengths.json"  # beside the buffer's state in a checkpoint, with --rollout-order longest_first


class RolloutManager:
    """See the picture above. Every public method is a coroutine of the actor's event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.next_step = 0
        self.running: Production | None = None  # from the first request for a step on
        self.evaluating: asyncio.Task[tuple[dict[str, float], list[Sample]]] | None = None
        self.opened: DataBuffer | None = None  # None until prepared, and when only evaluating
        self.dumps: RolloutDumps | None = None  # with --dump-rollouts
        self.drops = DropMetrics()
        self.lengths = LengthHistory()
        self.runtime: RolloutRuntime | None = None
        self.fence: ProcessFence | None = None
        self.gateway: Gateway | None = None

    async def prepare(self) -> None:
        """Read and check data and plugins. Raises ValueError before engines matter."""
        config = self.config
        GroupRunner(config)  # its functions are checked here, before any engine has done work
        path = config.logging.log_function_path
        self.log_function = LOG_FUNCTIONS.load(path) if path else None
        self.rollout_function = ROLLOUT_FUNCTIONS.load(rollout_function_name(config))
        self.tokenizer = load_tokenizer(config)
        self.fence = ProcessFence(config.reward.reward_num_workers, config.reward.reward_timeout_s)
        if config.reward.reward_function_path is None and config.reward.rm_type in FENCED_MODULES:
            self.fence.prewarm(FENCED_MODULES[config.reward.rm_type])
        if config.rollout.generate_function_path in NEED_PARSER:
            self._make_parser()  # its names are checked before engines matter
        if config.rollout.generate_function_path == "gateway":
            load_agent(config)
        if config.rollout.generate_function_path == "environment_loop":
            load_environment(config)
        self.evaluator = Evaluator(config, self._encode)
        if config.train.num_steps == 0:
            return
        self.dumps = open_dumps(config)
        self.opened = open_buffer(config, self._encode)
        self.first_state = copy.deepcopy(self.buffer.state_dict())

    def _make_parser(self) -> TurnParser:
        agent = self.config.agent
        return SglangParser(agent.tool_call_parser, agent.reasoning_parser, self.config.cluster.device)

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(self.config, self.tokenizer, prompt.prompt, prompt.metadata)

    @property
    def buffer(self) -> DataBuffer:
        assert self.opened is not None, "a run that only evaluates has no buffer"
        return self.opened

    async def connect(
        self, router_url: str | None, models: dict[str, str] | None = None, policy: str | None = None
    ) -> None:
        """Make the client; None for a run without engines. `models` are the routers of models beside the policy, and
        `policy` is the policy's name for a router that they share."""
        client, trace = None, open_trace(self.config, "rollout")
        if router_url is not None:
            slots = self.config.rollout.rollout_concurrency * self.config.cluster.rollout_num_engines
            client = EngineClient(
                router_url,
                max_in_flight=slots,
                timeout_s=self.config.rollout.request_timeout_s,
                trace=trace,
                headers=self.config.engine.authorization,
                model=policy,
            )
        if self.config.agent.agent_path is not None:
            self.gateway = Gateway()
            await self.gateway.start()
        self.runtime = RolloutRuntime(
            client=client,
            tokenizer=self.tokenizer,
            make_parser=self._make_parser,
            gateway=self.gateway,
            models=models or {},
            trace=trace,
            lengths=self.lengths,
        )
        watch_loop(self.config.rollout.group_timeout_s, self.config.run_dir / "logs" / BLOCKED_FILE)
        freeze_heap()

    @property
    def production(self) -> Production:
        """Begins with the first use, when buffer and client are ready and a checkpoint is loaded."""
        if self.running is None:
            with self._scope():  # inherited by the tasks that production starts
                if self.config.asynchrony.is_continuous and self.config.rollout.load_rollouts is None:
                    self.running = ContinuousProduction(self.config, self.buffer, self.next_step)
                else:
                    function = self.rollout_function
                    self.running = SteppedProduction(self.config, self.buffer, function, self.next_step)
        return self.running

    async def submit_through(self, step: int) -> None:
        """Have every step up to `step` produced, in order; returns at once."""
        with self._scope():
            self.production.submit_through(step)

    async def weights_are(self, version: int) -> None:
        """The engines serve the weights of `version` from now on."""
        if self.opened is not None:
            self.production.weights_are(version)

    async def take(self, step: int) -> dict[str, Any]:
        """Wait until `step` is produced. Answers `batch` (a StepBatch), `metrics`, `samples` (the few to show) and
        `texts` (of their response tokens).

        Raises whatever made the step's production fail.
        """
        started = time.monotonic()
        with self._scope():
            output = await self.production.take(step)
        waited = time.monotonic() - started
        if self.dumps is not None:
            self.dumps.write(step, output.groups)
        samples = [sample for group in output.groups for sample in group.samples]
        batch = rollout_batch_from_groups(output.groups, step, step, self.config.train.num_updates_per_rollout)
        summary = summarise_samples(samples)
        if self.config.train.loss == "sft":  # labels are not scored
            summary = {name: value for name, value in summary.items() if "reward" not in name and "std" not in name}
        metrics = output.metrics | summary | staleness(samples, step)
        counts = self.buffer.counts()
        metrics |= {f"buffer/{state}": float(count) for state, count in counts.items()}
        metrics |= self.drops.metrics(counts, output.groups)
        metrics["rollout/wait_s"] = waited
        if self.fence is not None:
            metrics |= self.fence.metrics()
        if self.runtime is not None and self.runtime.client is not None and self.runtime.client.num_prompt_tokens:
            client = self.runtime.client
            metrics["rollout/cached_prompt_tokens_fraction"] = client.num_cached_tokens / client.num_prompt_tokens
        if self.log_function is not None:
            metrics |= extra_metrics(self.log_function, self.config, step, samples)
        if self.config.buffer.offload_buffer:
            self.buffer.offload()
        seconds = metrics.get("rollout/seconds", 0.0)
        if seconds > 0:
            metrics["rollout/tokens_per_s"] = sum(s.response_length for s in samples) / seconds
        shown = samples[: self.config.logging.log_samples]
        assert self.runtime is not None, "connect comes first"
        texts = [token_texts(self.runtime.tokenizer, s.response_tokens[:MAX_LOGGED_TOKENS]) for s in shown]
        return {"batch": self._put(batch), "metrics": metrics, "samples": shown, "texts": texts}

    def _put(self, batch: RolloutBatch) -> StepBatch:
        config, sizes = self.config, [self.config.data_parallel_size]
        if config.critic_is_apart:
            sizes.append(config.critic_data_parallel_size)
        shards = {size: [ray.put(shard) for shard in split_for_data_parallel(batch, size)] for size in set(sizes)}
        return StepBatch(shards[sizes[0]], shards[sizes[1]] if len(sizes) > 1 else [])

    async def commit(self, step: int) -> None:
        self.buffer.commit(step)
        if self.config.buffer.offload_buffer:
            self.buffer.onload()

    async def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Metrics of every evaluation set and a few scored samples; nothing when `halt` ended it."""
        with self._scope():
            task = self.evaluating = asyncio.create_task(self.evaluator.evaluate())
        await asyncio.wait([task])
        if task.cancelled():
            return {}, []
        metrics, samples = task.result()
        return metrics, samples[: self.config.logging.log_samples]

    async def save(self, path: str) -> None:
        """Write the buffer's state as JSON, its tensors beside it, and lengths.json where prompts start by length."""
        save_state(Path(path), self.buffer.state_dict())
        if self.config.asynchrony.rollout_order == "longest_first":
            save_state(Path(path).with_name(LENGTHS_FILE), self.lengths.state_dict())

    async def restore(self, path: str | None, next_step: int) -> None:
        """Load it again, or without a path the state before the first step; production goes on with `next_step`.

        A run that only evaluates has no state: its weights are the trainer's affair.
        """
        if self.opened is None:
            return
        state = copy.deepcopy(self.first_state) if path is None else load_state(Path(path))
        self.buffer.load_state_dict(state)
        self.lengths.load_state_dict(_lengths_beside(path))
        self.drops.start_from(self.buffer.counts())
        self.next_step = next_step
        if self.dumps is not None:
            self.dumps.remove_from(next_step)

    async def halt(self) -> None:
        """Cancel production and evaluation; `restore` comes next."""
        if self.evaluating is not None:
            self.evaluating.cancel()
            await asyncio.gather(self.evaluating, return_exceptions=True)  # whoever asked for it hears of a failure
            self.evaluating = None
        if self.running is not None:
            await self.running.close()
            self.running = None

    async def close(self) -> None:
        """Cancel what runs, end the reward processes, close the client."""
        await self.halt()
        if self.opened is not None:
            self.opened.close()
        if self.fence is not None:
            self.fence.close()
        if self.gateway is not None:
            await self.gateway.close()
        if self.runtime is not None:
            self.runtime.trace.close()
            if self.runtime.client is not None:
                await self.runtime.client.close()

    @contextmanager
    def _scope(self) -> Iterator[None]:
        assert self.runtime is not None and self.fence is not None, "prepare and connect come first"
        with use_runtime(self.runtime), use_fence(self.fence):
            yield


def _lengths_beside(path: str | None) -> dict[str, Any]:
    """The length history saved with the buffer at `path`; an empty one where the run that saved it kept none."""
    file = None if path is None else Path(path).with_name(LENGTHS_FILE)
    return load_state(file) if file is not None and file.is_file() else LengthHistory().state_dict()


def staleness(samples: list[Sample], step: int) -> dict[str, float]:
    """Age of the tokens that are trained on in `step`, in weight versions: mean over tokens, the oldest, and shares."""
    ages = Counter(
        step - version
        for sample in samples
        for version, trained in zip(sample.weight_versions, sample.loss_mask, strict=True)
        if trained and version >= 0
    )
    if not ages:
        return {}
    count, shares = ages.total(), Counter()
    for age, tokens in ages.items():
        shares[str(age) if age < OLD_AGE else f"{OLD_AGE}_or_more"] += tokens
    return {
        "rollout/staleness_mean": sum(age * tokens for age, tokens in ages.items()) / count,
        "rollout/staleness_max": float(max(ages)),
        **{f"rollout/tokens_by_age/{age}": tokens / count for age, tokens in sorted(shares.items())},
    }
