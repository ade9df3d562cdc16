"""Rewards from a service: one of your own, or a scalar-head model that SGLang serves."""

from __future__ import annotations

from typing import Any

from slime_rl.config import Config
from slime_rl.rollout.rewards.http import post_json, reward_service
from slime_rl.rollout.runtime import current_runtime
from slime_rl.rollout.together import together
from slime_rl.types import Sample


async def remote(config: Config, group: list[Sample]) -> list[float | dict[str, Any]]:
    """What the service at --reward-url answers.

    It is sent `{"samples": [{"prompt", "response", "label", "metadata"}, …]}`, at most --reward-batch-size at once, and
    answers `{"rewards": [number or {"score": number, …}, …]}`, one for each.

    Raises:
        ValueError: no --reward-url, a refusal, or an answer of another form.
        TimeoutError: no answer within --reward-request-timeout-s.
    """
    url = reward_service(config, "remote").url
    size = config.reward.reward_batch_size
    parts = [group[i : i + size] for i in range(0, len(group), size)]
    answers = await together(_ask(config, url, part) for part in parts)
    return [reward for rewards in answers for reward in rewards]


async def _ask(config: Config, url: str, part: list[Sample]) -> list[float | dict[str, Any]]:
    rows = [{"prompt": s.prompt, "response": s.response, "label": s.label, "metadata": s.metadata} for s in part]
    answer = await post_json(url, {"samples": rows}, config.reward.reward_request_timeout_s)
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(part):
        raise ValueError(f"--reward-url {url} must answer 'rewards' for {len(part)} samples, got {str(answer)[:300]}")
    return rewards


async def reward_model(config: Config, group: list[Sample]) -> list[float]:
    """The scalar of a reward model that SGLang serves at --reward-url (launched with --is-embedding), which may be a
    model of --sglang-config.

    It is sent prompt and response as the policy's template renders them; the first number of each embedding counts.

    Raises:
        ValueError: no --reward-url, a refusal, or an answer of another form.
        TimeoutError: no answer within --reward-request-timeout-s.
    """
    service = reward_service(config, "reward_model")

    async def find_url() -> str:
        return await service.engine_url() + "/classify"

    body = {"text": [conversation_text(sample) for sample in group]}
    answer = await post_json(find_url, body, config.reward.reward_request_timeout_s, service.headers)
    url = config.reward.reward_url
    try:
        scores = [float(item["embedding"][0]) for item in answer]
    except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"--reward-url {url} answered no embeddings: {str(answer)[:300]}") from error
    if len(scores) != len(group):
        raise ValueError(f"--reward-url {url} must answer {len(group)} embeddings, got {len(scores)}")
    return scores


def conversation_text(sample: Sample) -> str:
    """Prompt and response by the chat template of the policy's tokenizer, without a generation prompt."""
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages.append({"role": "assistant", "content": sample.response})
    tokenizer = current_runtime().tokenizer
    if not tokenizer.chat_template:
        return "\n".join(str(message.get("content") or "") for message in messages)
    return tokenizer.apply_chat_template(messages, tokenize=False)
