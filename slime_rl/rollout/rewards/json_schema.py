"""Reward for a response that is JSON of a given schema."""

from __future__ import annotations

import json
from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.answers import without_thinking
from slime_rl.rollout.rewards.code_blocks import last_block
from slime_rl.rollout.rewards.fence import current_fence
from slime_rl.types import Sample

FENCED = "slime_rl.rollout.rewards.json_schema_fenced:problem_of"
BROKEN_SCHEMA = "broken schema: "  # begins what the fenced function says of a row's fault, not the response's


async def json_schema(config: Config, group: list[Sample]) -> list[dict[str, Any]]:
    """1 where the response is JSON that `metadata["schema"]` allows, else 0 with the reason as `problem`.

    The JSON is the last block of the response in JSON, else the last that names no language, or all of it. Where the
    sample has a label that is an object or a list, or the JSON text of one, the value must equal it too. Schemas may
    contain regular expressions, so that checking runs fenced.

    Raises:
        ValueError: a sample whose metadata has no schema, or one that is broken.
    """
    calls = [(_schema_of(sample), json_text(sample.response), _label_of(sample)) for sample in group]
    answers = await current_fence().call_many(FENCED, calls)
    values: list[dict[str, Any]] = []
    for sample, answer in zip(group, answers, strict=True):
        if isinstance(answer.value, str) and answer.value.startswith(BROKEN_SCHEMA):
            raise ValueError(f"--rm-type json_schema: metadata['schema'] of sample {sample.index}: {answer.value}")
        if answer.failure is not None:
            values.append(answer.score_dict())
        else:
            values.append({"score": float(answer.value == ""), "problem": answer.value})
    return values


def json_text(response: str) -> str:
    """The last block of JSON (see `last_block`), or the whole response without thoughts."""
    text = without_thinking(response)
    block = last_block(text, ("json",))
    return text.strip() if block is None else block


def _label_of(sample: Sample) -> Any:
    if isinstance(sample.label, str) and sample.label.lstrip().startswith(("{", "[")):
        try:
            return json.loads(sample.label)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"--rm-type json_schema: the label of sample {sample.index} looks like JSON and is none: {error}"
            ) from error
    return sample.label


def _schema_of(sample: Sample) -> Any:
    schema = sample.metadata.get("schema")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--rm-type json_schema: metadata['schema'] of sample {sample.index}: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise ValueError(
            f"--rm-type json_schema needs metadata['schema'] (a JSON schema) for every prompt, got {schema!r} "
            f"for sample {sample.index}"
        )
    return schema
