"""How one sample gets its response: the default `--generate-function-path single_turn`."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import GenerateFunction
from slime_rl.registry import ExtensionPoint
from slime_rl.rollout.client import NOTHING, Generation
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.scope import current_scope
from slime_rl.types import Sample, Status

GENERATE_FUNCTIONS = ExtensionPoint(
    flag="--generate-function-path",
    protocol=GenerateFunction,
    builtins={
        "agent_loop": "slime_rl.rollout.agent:agent_loop",
        "environment_loop": "slime_rl.rollout.agent.environments:environment_loop",
        "gateway": "slime_rl.rollout.agent.black_box:gateway",
        "single_turn": "slime_rl.rollout.generate:single_turn",
    },
)

MAX_CONTINUATIONS = 100  # of one answer that engines break off (weight updates, failures)
DROP_HINT = "--rollout-error drop would drop the group instead"
_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def keeps_episodes(config: Config) -> bool:
    """Whether the run's generate function is one of ours that keep an episode in `metadata["agent"]`."""
    path = config.rollout.generate_function_path
    return GENERATE_FUNCTIONS.builtins.get(path, path).startswith("slime_rl.rollout.agent")


async def single_turn(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One request: the prompt goes in, the response with its log-probs and versions comes back."""
    answer = await current_runtime().engine.generate(sample.tokens, sampling_params)
    append_generation(sample, answer)
    return sample


def append_generation(sample: Sample, answer: Generation) -> None:
    """Append an engine's answer to the response, keeping tokens exactly as sampled."""
    if answer.finish_reason not in _STATUS:
        raise ValueError(f"sample {sample.index}: unknown finish reason {answer.finish_reason!r} from the engine")
    sample.append_tokens(answer.tokens, log_probs=answer.log_probs, versions=answer.versions)
    sample.response += answer.text
    sample.status = _STATUS[answer.finish_reason]


async def generate_whole(
    input_ids: list[int], sampling_params: dict[str, Any], *, routing_key: str | None = None
) -> Generation:
    """One answer that goes on from its tokens where engines break it off: for callers that cannot go on later.

    Its finish reason is `abort` only when the run has interrupted the sample, which then starts anew.

    Raises:
        TimeoutError: it was broken off MAX_CONTINUATIONS times; and what the engine's `generate` raises.
    """
    engine, scope = current_runtime().engine, current_scope()
    whole = NOTHING
    for _ in range(MAX_CONTINUATIONS):
        left = sampling_params["max_new_tokens"] - len(whole.tokens)
        params = {**sampling_params, "max_new_tokens": left}
        part = await engine.generate(input_ids + whole.tokens, params, routing_key=routing_key)
        whole = dataclasses.replace(
            part,
            tokens=whole.tokens + part.tokens,
            log_probs=whole.log_probs + part.log_probs,
            versions=whole.versions + part.versions,
            text=whole.text + part.text,
        )
        if part.finish_reason != "abort" or (scope is not None and scope.interrupted):
            return whole
        if len(whole.tokens) >= sampling_params["max_new_tokens"]:
            if scope is not None:
                scope.was_cut = False  # it is whole
            return dataclasses.replace(whole, finish_reason="length")
    raise TimeoutError(f"the engines broke an answer off {MAX_CONTINUATIONS} times")


def train_sampling_params(config: Config) -> dict[str, Any]:
    """SGLang's sampling parameters for rollouts that train."""
    params: dict[str, Any] = {
        "temperature": config.sampling.rollout_temperature,
        "top_p": config.sampling.rollout_top_p,
        "top_k": config.sampling.rollout_top_k,
        "max_new_tokens": config.sampling.max_response_len,
    }
    if config.sampling.rollout_stop:
        params["stop"] = list(config.sampling.rollout_stop)
    return params


def seeded(config: Config, sample: Sample, params: dict[str, Any]) -> dict[str, Any]:
    """`params` for this sample: with a seed of its own when --deterministic is on."""
    if not config.train.deterministic:
        return params
    return {**params, "sampling_seed": _seed_of(f"{config.train.seed} {sample.index}")}


class RequestSeeds:
    """Seeds for the requests of one sample that makes several: with one for all, equal prompts had equal answers.

    A seed depends on the sample's, on what precedes the answer, and on how many requests asked for the same before: so
    requests that differ may come in any order, as those of agents with sub-agents do.
    """

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def seeded(self, params: dict[str, Any], input_ids: Sequence[int], role: str = "") -> dict[str, Any]:
        """`params` for a request after `input_ids [P]`; unchanged where the sample has no seed."""
        if "sampling_seed" not in params:
            return params
        ids = hashlib.blake2b(array("i", input_ids).tobytes(), digest_size=16).hexdigest()
        what = f"{params['sampling_seed']} {ids} {role}"
        number = self._asked[what]
        self._asked[what] += 1
        return {**params, "sampling_seed": _seed_of(f"{number} {what}")}


def _seed_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def eval_sampling_params(config: Config) -> dict[str, Any]:
    """The same for held-out prompts."""
    return train_sampling_params(config) | {
        "temperature": config.evaluation.eval_temperature,
        "top_p": config.evaluation.eval_top_p,
        "top_k": config.evaluation.eval_top_k,
        "max_new_tokens": config.evaluation.eval_max_response_len or config.sampling.max_response_len,
    }
