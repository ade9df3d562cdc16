"""Held-out prompts: generated with their own sampling settings, scored by the same reward, never trained on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from slime_rl.buffer.sources import check_prompt_lengths, read_prompts
from slime_rl.config import Config
from slime_rl.rollout.generate import eval_sampling_params
from slime_rl.rollout.groups import GroupRunner
from slime_rl.types import Group, Prompt, Sample, Status


class Evaluator:
    """Reads every evaluation set once and scores it on demand."""

    def __init__(self, config: Config, encode: Callable[[Prompt], list[int]]) -> None:
        self.config = config
        limit, policy = config.sampling.max_prompt_len, config.data.long_prompt
        self.sets = {
            name: check_prompt_lengths(read_prompts(path, config.data), encode, limit, policy)
            for name, path in config.evaluation.datasets
        }

    async def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Metrics `eval/<set>/*` and the scored samples of all sets."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        runner = GroupRunner(self.config)
        for name, prompts in self.sets.items():
            started = time.monotonic()
            groups = [self._group(i, prompt) for i, prompt in enumerate(prompts)]
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(self._run(runner, group))
            metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups).items()}
            metrics[f"eval/{name}/seconds"] = time.monotonic() - started
            samples += [sample for group in groups for sample in group.samples]
        return metrics, samples

    async def _run(self, runner: GroupRunner, group: Group) -> None:
        await runner.generate_samples(group, eval_sampling_params(self.config))
        await runner.score(group.samples)

    def _group(self, index: int, prompt: Prompt) -> Group:
        n = self.config.evaluation.eval_n_samples_per_prompt
        samples = [
            Sample(
                index=index * n + i,
                group_index=index,
                rollout_id=index * n + i,
                prompt=prompt.prompt,
                label=prompt.label,
                metadata=dict(prompt.metadata),
            )
            for i in range(n)
        ]
        return Group(group_index=index, source_index=prompt.source_index, epoch=0, samples=samples)


def summarise(groups: list[Group]) -> dict[str, float]:
    """Accuracy (mean reward), pass@k (share of prompts with a sample of reward >= 1), lengths and truncation."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward or 0.0 for sample in samples]
    solved = [any((sample.reward or 0.0) >= 1.0 for sample in group.samples) for group in groups]
    return {
        "accuracy": sum(rewards) / len(rewards),
        "pass_at_k": sum(solved) / len(solved),
        "response_length_mean": sum(s.response_length for s in samples) / len(samples),
        "truncated_fraction": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "num_prompts": float(len(groups)),
    }
