"""Tasks of reasoning-gym with another try after a wrong answer: an environment on somebody else's verifier.

    --data-source-path plugins.data.reasoning_gym_source:ReasoningGymSource --prompt-data "chain_sum?size=500&seed=1"
    --generate-function-path environment_loop
    --environment-path plugins.environments.reasoning_gym_retry:ReasoningGymEnvironment --rm-type episode

A right answer is worth 1 at the first try and half as much at each further one.
"""

from __future__ import annotations

from typing import Any

from plugins.data.reasoning_gym_source import METADATA_KEY
from plugins.rewards.reasoning_gym import FENCED, answer_of
from slime_rl.config import Config
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.types import EnvironmentStart, EnvironmentStep, Sample

TRIES = 3
AGAIN = "That is not right. Try again and answer with just the result."


class ReasoningGymEnvironment:
    """One task; the verifier runs in the process fence."""

    def __init__(self, config: Config, sample: Sample) -> None:
        told = sample.metadata.get(METADATA_KEY)
        if not isinstance(told, dict):
            raise ValueError(f"take prompts from plugins.data.reasoning_gym_source; sample {sample.index} has no task")
        self.task, self.entry = told["task"], told["entry"]
        self.prompt = sample.prompt
        self.tries = 0

    async def reset(self) -> EnvironmentStart:
        prompt = self.prompt
        return EnvironmentStart(messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    async def step(self, action: dict[str, Any]) -> EnvironmentStep:
        self.tries += 1
        given = answer_of(action["content"], self.entry)
        verdict = await current_fence().call(FENCED, self.task, self.entry, given)
        if verdict.failure is None and verdict.value == 1.0:
            return EnvironmentStep(reward=0.5 ** (self.tries - 1), done=True)
        if self.tries == TRIES:
            return EnvironmentStep(done=True)
        return EnvironmentStep(messages=[{"role": "user", "content": AGAIN}])

    async def close(self) -> None:
        """Nothing is held."""
