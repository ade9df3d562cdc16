"""Held-out prompts: each set generated and scored with its own settings, never trained on.

Production of training samples goes on meanwhile where it is asynchronous; both share the engines' slots.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean

from slime_rl.buffer.sources import check_prompt_lengths, read_prompts
from slime_rl.config import Config
from slime_rl.config.evaluation import for_evaluation
from slime_rl.data.episodes import episodes_of, mean
from slime_rl.rollout.generate import DROP_HINT, eval_sampling_params
from slime_rl.rollout.groups import GroupRunner
from slime_rl.rollout.rewards.answers import final_answer, without_thinking
from slime_rl.rollout.slots import Slots
from slime_rl.rollout.together import together
from slime_rl.types import Group, Prompt, Sample, Status

SOLVED = 1.0  # a reward from which on a response counts as right
ATTEMPTS = 3  # to finish a sample that an engine gave back, as one that is restarted does


class EvaluationSet:
    """The prompts of one set, with the Config that it is evaluated with."""

    def __init__(self, config: Config, name: str, path: str, encode: Callable[[Prompt], list[int]]) -> None:
        self.name, self.config = name, for_evaluation(config, name)
        data, most = self.config.data, config.sampling.max_prompt_len
        rows = read_prompts(path, data)
        self.prompts = check_prompt_lengths(rows, encode, most, data.long_prompt, data.bad_rows)
        self.runner = GroupRunner(self.config)
        requests = self.config.rollout.rollout_concurrency * self.config.cluster.rollout_num_engines
        # Enough to keep the engines busy; all at once would count their waiting for each other as --group-timeout-s.
        self.most_groups = max(1, 2 * requests // self.config.evaluation.eval_n_samples_per_prompt)

    async def evaluate(self) -> list[Group]:
        """Every prompt with its scored samples, in order.

        Raises:
            TimeoutError: a prompt took longer than --group-timeout-s; names the set.
            ValueError: what its generate or reward function raised; names the set.
        """
        groups = [self._group(i, prompt) for i, prompt in enumerate(self.prompts)]
        turns = Slots(self.most_groups)
        try:
            await together(self._run(group, turns) for group in groups)
        except (ValueError, TimeoutError) as error:
            kind = ValueError if isinstance(error, ValueError) else TimeoutError
            what = str(error).replace(f"; {DROP_HINT}", "")  # which holds for groups that train
            raise kind(f"evaluation set {self.name}: {what}") from error
        return groups

    async def _run(self, group: Group, turns: Slots) -> None:
        async with turns:
            await self.runner.bounded(group, self._generate_and_score(group))

    async def _generate_and_score(self, group: Group) -> None:
        for _ in range(ATTEMPTS):
            await self.runner.generate_samples(group, eval_sampling_params(self.config))
            if all(sample.status.is_finished for sample in group.samples):
                break
        await self.runner.score(group.samples)

    def _group(self, index: int, prompt: Prompt) -> Group:
        n = self.config.evaluation.eval_n_samples_per_prompt
        samples = [
            Sample(
                index=index * n + i,
                group_index=index,
                rollout_id=index * n + i,
                prompt=copy.deepcopy(prompt.prompt),
                label=copy.deepcopy(prompt.label),
                metadata=copy.deepcopy(prompt.metadata),
            )
            for i in range(n)
        ]
        return Group(group_index=index, source_index=prompt.source_index, epoch=0, samples=samples)


class Evaluator:
    """Reads every evaluation set once and scores it on demand."""

    def __init__(self, config: Config, encode: Callable[[Prompt], list[int]]) -> None:
        self.sets = {name: EvaluationSet(config, name, path, encode) for name, path in config.evaluation.datasets}

    async def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Metrics `eval/<set>/*` and the scored samples of all sets."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for name, one in self.sets.items():
            started = time.monotonic()
            groups = await one.evaluate()
            metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups).items()}
            metrics[f"eval/{name}/seconds"] = time.monotonic() - started
            samples += [sample for group in groups for sample in group.samples]
        return metrics, samples


def summarise(groups: list[Group]) -> dict[str, float]:
    """Accuracy (mean reward), pass@k, majority vote, lengths and truncation.

    The samples that a generate function makes of one count once: with the mean of their rewards, and the last answer.
    Samples that were given up on, or never came to an end, count with the reward that they got; their share is shown.
    """
    samples = [sample for group in groups for sample in group.samples]
    tries = [episodes_of(group.samples) for group in groups]
    rewards = [[mean([sample.reward or 0.0 for sample in episode]) for episode in episodes] for episodes in tries]
    solved = [sum(reward >= SOLVED for reward in found) for found in rewards]
    metrics = {
        "accuracy": fmean(reward for found in rewards for reward in found),
        "pass_at_k": sum(count > 0 for count in solved) / len(solved),
        "response_length_mean": fmean(sample.response_length for sample in samples),
        "truncated_fraction": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "num_prompts": float(len(groups)),
    }
    if unfinished := sum(not sample.status.is_finished for sample in samples):
        metrics["unfinished_fraction"] = unfinished / len(samples)
    n = min(len(episodes) for episodes in tries)
    if n > 1:
        metrics["majority"] = fmean(majority([episode[-1] for episode in episodes]) for episodes in tries)
        for k in (2**i for i in range(n.bit_length()) if 2**i <= n):
            chances = [pass_at_k(len(found), count, k) for found, count in zip(rewards, solved, strict=True)]
            metrics[f"pass_at_{k}"] = fmean(chances)
    return metrics


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.
    """
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def majority(samples: list[Sample]) -> float:
    """Share of right ones among the most frequent final answers: 1 or 0, and in between only when answers tie."""
    answers = [final_answer(s.response) or without_thinking(s.response).strip() for s in samples]
    votes = Counter(answers)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = {a for a, s in zip(answers, samples, strict=True) if (s.reward or 0.0) >= SOLVED}
    return sum(answer in right for answer in winners) / len(winners)
