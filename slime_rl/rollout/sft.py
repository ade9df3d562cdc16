"""Supervised rounds of the same loop: the label is the response, nothing is generated, nothing is scored."""

from __future__ import annotations

import time

from slime_rl.config import Config
from slime_rl.protocols import DataBuffer
from slime_rl.rollout.groups import prepare
from slime_rl.rollout.runtime import current_runtime
from slime_rl.types import RolloutOutput, Sample, Status


async def labels_as_responses(config: Config, step: int, buffer: DataBuffer) -> RolloutOutput:
    """Take `rollout_batch_size` prompts and append each one's label and the end token as the trained response."""
    started = time.monotonic()
    needed = config.train.rollout_batch_size
    for group in buffer.reserve(max(0, needed - len(buffer))):
        for sample in group.samples:
            _append_label(config, sample)
        buffer.admit(group)
    groups = buffer.take(step, needed)
    return RolloutOutput(groups=groups, metrics={"rollout/seconds": time.monotonic() - started})


def _append_label(config: Config, sample: Sample) -> None:
    tokenizer = current_runtime().tokenizer
    if not isinstance(sample.label, str):
        raise ValueError(
            f"--loss sft: --label-key {config.data.label_key!r} must hold text, got {sample.label!r} "
            f"in sample {sample.index}"
        )
    prepare(config, [sample])
    tokens = tokenizer.encode(sample.label, add_special_tokens=False)[: config.sampling.max_response_len - 1]
    tokens.append(tokenizer.eos_token_id)
    sample.append_tokens(tokens, log_probs=[0.0] * len(tokens), versions=[-1] * len(tokens))
    sample.response, sample.status, sample.reward = sample.label, Status.COMPLETED, 0.0
