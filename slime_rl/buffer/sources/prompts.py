"""A row of a data file as a checked prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_rl.buffer.sources.plain import from_json_text, plain
from slime_rl.config import DataConfig
from slime_rl.types import Prompt

# Columns with these names are carried along in the metadata, as rewards, tools and generate functions expect them:
# verl's, tools, and the payload of multimodal prompts.
CARRIED = ("data_source", "extra_info", "ability", "agent_name", "tools", "images", "videos", "audios")
SKIP_HINT = "--bad-rows skip leaves such rows out"


@dataclass(frozen=True, kw_only=True)
class LocatedPrompt(Prompt):
    """A prompt that knows where it was read, for messages to the user."""

    origin: str  # file:line


class UnrenderedError(ValueError):
    """A prompt that cannot be rendered: a bad row."""


def prompt_from_row(row: dict[str, Any], source_index: int, origin: str, data: DataConfig) -> LocatedPrompt:
    """Check a row and take prompt, label and metadata from it.

    Raises:
        ValueError: a key that is missing or of another type than it must be; names the place and the row's keys.
    """
    if data.input_key not in row:
        raise ValueError(f"{origin}: no {data.input_key!r} (--input-key); {_keys(row)}")
    for key in (data.input_key, data.label_field, data.metadata_key, "reward_model", *CARRIED):
        if key in row:  # columns that nobody reads may hold anything
            value = row[key]
            if (changed := plain(value, f"{origin}: {key!r:.80}")) is not value:
                row = {**row, key: changed}
    prompt = row[data.input_key]
    check_prompt(prompt, f"{origin}: {data.input_key!r} (--input-key)")
    return LocatedPrompt(
        source_index=source_index,
        prompt=prompt,
        label=_label(row, origin, data),
        metadata=_metadata(row, origin, data),
        origin=origin,
    )


def check_prompt(prompt: Any, what: str) -> None:
    """Raise ValueError, beginning with `what`, unless it is text or chat messages that a template can render."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{what} is empty")
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{what} must be text or a list of chat messages, got {_shown(prompt)}")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f"{what}: message {number} must have 'role' and 'content', got {_shown(message)}")
        if not isinstance(message["role"], str):
            raise ValueError(f"{what}: message {number}: 'role' must be text, got {_shown(message['role'])}")
        if not _is_content(message):
            raise ValueError(
                f"{what}: message {number}: 'content' must be text or a list of parts (or null in a message of the "
                f"assistant), got {_shown(message['content'])}"
            )


def _is_content(message: dict[str, Any]) -> bool:
    """Templates write other values as they are, a null as 'None'."""
    content = message["content"]
    if isinstance(content, list):
        return all(isinstance(part, dict | str) for part in content)
    return isinstance(content, str) or (content is None and message["role"] == "assistant")


def _label(row: dict[str, Any], origin: str, data: DataConfig) -> Any:
    if data.label_field is None:
        return None
    label = row.get(data.label_field)
    if label is None and isinstance(row.get("reward_model"), dict):
        label = row["reward_model"].get("ground_truth")
    if label is None or label != label:
        problem = "is missing" if data.label_field not in row else "is null" if label is None else "is NaN"
        raise ValueError(
            f"{origin}: {data.label_field!r} (--label-key) {problem}; {_keys(row)}; "
            "pass --label-key none for prompts without labels"
        )
    return label


def _metadata(row: dict[str, Any], origin: str, data: DataConfig) -> dict[str, Any]:
    metadata = row.get(data.metadata_key)
    what = f"{origin}: {data.metadata_key!r} (--metadata-key)"
    if isinstance(metadata, str) and metadata:
        metadata = from_json_text(metadata, what)
    if not metadata:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{what} must be a dictionary, got {_shown(metadata)}")
    carried = {key: row[key] for key in CARRIED if row.get(key) is not None}
    tools = carried.get("tools")
    if isinstance(tools, str):  # columnar files hold nested tool schemas as text
        carried["tools"] = from_json_text(tools, f"{origin}: 'tools'")
    return {**carried, **metadata}


def check_prompt_lengths(
    prompts: Sequence[Prompt],
    encode: Callable[[Prompt], Sequence[int]],
    max_prompt_len: int,
    policy: Literal["error", "skip"],
    bad_rows: Literal["error", "skip"] = "error",
) -> list[Prompt]:
    """The prompts of at most `max_prompt_len` tokens, as `encode` renders them.

    Raises:
        ValueError: a longer one with policy "error", one that cannot be rendered with bad_rows "error", or nothing left
            with "skip"; names file:line and the length.
    """
    problems: list[str | None] = []
    for prompt in prompts:
        try:
            problems.append(prompt_length_problem(prompt, encode, max_prompt_len, policy))
        except UnrenderedError as error:
            if bad_rows == "error":
                raise ValueError(f"{error} ({SKIP_HINT})") from error
            problems.append(str(error))
    kept = [prompt for prompt, problem in zip(prompts, problems, strict=True) if problem is None]
    if prompts and not kept:
        raise ValueError(f"--long-prompt or --bad-rows skip leaves no prompt at all; the last one: {problems[-1]}")
    return kept


def prompt_length_problem(
    prompt: Prompt, encode: Callable[[Prompt], Sequence[int]], max_prompt_len: int, policy: Literal["error", "skip"]
) -> str | None:
    """None for a prompt of at most `max_prompt_len` tokens, else what is wrong; raises it with policy "error".

    Raises:
        UnrenderedError: the chat template or the tools reject it; names file:line.
        ValueError: also where a flag leaves no way to render it.
    """
    where = prompt.origin if isinstance(prompt, LocatedPrompt) else f"prompt {prompt.source_index}"
    try:
        length = len(encode(prompt))
    except ValueError as error:
        kind = ValueError if str(error).startswith("--") else UnrenderedError  # a flag that fits no row
        raise kind(f"{where}: {error}") from error
    if length <= max_prompt_len:
        return None
    problem = f"{where}: the prompt has {length} tokens, over --max-prompt-len {max_prompt_len}"
    if policy == "error":
        raise ValueError(f"{problem}; raise the limit, or pass --long-prompt skip to leave such prompts out")
    return problem


def _keys(row: dict[str, Any]) -> str:
    return f"the row has {', '.join(sorted(map(str, row))) or 'no keys'}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
