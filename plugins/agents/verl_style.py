"""Runs agent loops in the manner of verl's AgentLoop as a generate function; verl itself is not needed for it.

    --generate-function-path my_module:generate

    generate = from_verl(MyAgentLoop)

Such a class is constructed with tokenizer, server_manager, config (and processor=None where it takes one), and has
`async run(sampling_params, **row) -> output` with prompt_ids, response_ids, response_mask and optionally reward_score
and num_turns. It samples with `await self.server_manager.generate(request_id=…, prompt_ids=…, sampling_params=…)`.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from slime_rl.config import Config
from slime_rl.protocols import GenerateFunction
from slime_rl.rollout.client import Generation
from slime_rl.rollout.generate import RequestSeeds, generate_whole
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import Sample, Status


class Interrupted(Exception):
    """Ends a loop whose sample the run has interrupted."""


@dataclass
class TokenOutput:
    """What verl's server manager answers."""

    token_ids: list[int]
    log_probs: list[float]


class ServerManager:
    """Our client behind verl's interface; remembers what was sampled, with versions."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.sampled: list[Generation] = []
        self._seeds = RequestSeeds()
        self.interrupted = False  # by the run: loops know no such end, and must not go on from a part of a turn

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample after `prompt_ids`. Temperature and length are the run's unless the loop asks for less length.

        Raises:
            Interrupted: the run has interrupted the sample.
        """
        asked = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        limit = min(self.defaults["max_new_tokens"], asked or self.defaults["max_new_tokens"])
        params = self._seeds.seeded({**self.defaults, "max_new_tokens": limit}, prompt_ids)
        answer = await generate_whole(list(prompt_ids), params, routing_key=str(request_id))
        if answer.finish_reason == "abort":
            self.interrupted = True
            raise Interrupted("the run has interrupted this sample; it starts anew later")
        self.sampled.append(answer)
        return TokenOutput(answer.tokens, answer.log_probs)


def from_verl(loop_class: type) -> GenerateFunction:
    """A generate function that runs `loop_class` once for each sample."""

    async def generate(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        manager = ServerManager(sampling_params)
        offered = {
            "config": config,
            "trainer_config": config,
            "server_manager": manager,
            "tokenizer": current_runtime().tokenizer,
            "processor": None,
        }
        wanted = inspect.signature(loop_class).parameters
        loop = loop_class(**{name: value for name, value in offered.items() if name in wanted})
        prompt = sample.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = {"raw_prompt": messages, "extra_info": sample.metadata, "reward_model": {"ground_truth": sample.label}}
        row = copy.deepcopy(row)  # loops go on with the lists that they are given
        sample.clear_response()
        output: Any = None
        try:
            output = await loop.run(sampling_params, **row)
        except Exception:
            if not manager.interrupted:
                raise
        if manager.interrupted:  # also where the loop has made something of it
            sample.status = Status.ABORTED
            return sample
        return take_output(sample, output, manager.sampled)

    return generate


def take_output(sample: Sample, output: Any, sampled: list[Generation]) -> Sample:
    """Write a loop's output into `sample`; log-probs and versions are those of the requests, in order.

    Raises:
        ValueError: tokens with mask 1 that are not what was sampled: the loop has changed or re-tokenised them.
    """
    known = [entry for g in sampled for entry in zip(g.tokens, g.log_probs, g.versions, strict=True)]
    position = 0
    sample.set_prompt_tokens(list(output.prompt_ids))
    for token, trained in zip(output.response_ids, output.response_mask, strict=True):
        if not trained:
            sample.append_tokens([token], trained=False)
            continue
        if position >= len(known) or known[position][0] != token:
            raise ValueError(
                f"sample {sample.index}: response token {sample.response_length} was not sampled like that"
            )
        _, log_prob, version = known[position]
        sample.append_tokens([token], log_probs=[log_prob], versions=[version])
        position += 1
    sample.response = current_runtime().tokenizer.decode(sample.response_tokens, skip_special_tokens=True)
    cut = not sampled or sampled[-1].finish_reason == "length" or position < len(known)
    sample.status = Status.TRUNCATED if cut else Status.COMPLETED
    state: dict[str, Any] = {"num_turns": getattr(output, "num_turns", len(sampled)), "parting": None}
    state |= {"num_tool_calls": 0, "num_tool_errors": 0, "stop_reason": "length" if cut else "stop"}
    state["reward"] = getattr(output, "reward_score", None)
    sample.metadata["agent"] = state
    return sample
