"""Two model turns with a hint in between: generation that is more than one request.

    --generate-function-path plugins.generate.second_thought:generate

prompt ──► first answer ──► hint (appended as tokens, not trained on) ──► second answer ──► one sample
"""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.generate import append_generation
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status

HINT = "\nCheck the answer and give the final one.\n"


async def generate(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Fill `sample` with both answers; --max-response-len bounds first answer, hint and second answer together.

    There is no second turn when the first one was interrupted, or when the hint leaves no token for it. An interrupted
    sample goes on where it stopped: what is already in its response is kept and only the rest is asked for.
    """
    runtime = current_runtime()
    hint = runtime.tokenizer.encode(HINT, add_special_tokens=False)
    budget = sampling_params["max_new_tokens"]
    if not _has_hint(sample):
        if not await _turn(sample, sampling_params, budget) or budget - sample.response_length <= len(hint):
            return sample
        sample.append_tokens(hint, trained=False)
        sample.response += HINT
    await _turn(sample, sampling_params, budget)
    return sample


def _has_hint(sample: Sample) -> bool:
    return 0 in sample.loss_mask


async def _turn(sample: Sample, sampling_params: dict[str, Any], budget: int) -> bool:
    """One request with what is left of the budget; whether it ended of itself or by that limit."""
    left = budget - sample.response_length
    params = {**sampling_params, "max_new_tokens": left}
    append_generation(sample, await current_runtime().engine.generate(sample.tokens, params))
    return sample.status is not Status.ABORTED
