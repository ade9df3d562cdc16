"""The buffer's extension points: each flag, its protocol and its built-ins. Nothing is imported before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_rl.protocols import BufferFilter, Curriculum, DataBuffer, GroupFilter, PromptSource, SampleFilter, Stateful
from slime_rl.registry import ExtensionPoint

if TYPE_CHECKING:
    from slime_rl.config import Config

BUFFERS = ExtensionPoint(
    flag="--buffer-path",
    protocol=DataBuffer,
    builtins={"ledger": "slime_rl.buffer.ledger_buffer:LedgerBuffer"},
)
BUFFER_FILTERS = ExtensionPoint(
    flag="--buffer-filter-path",
    protocol=BufferFilter,
    builtins={
        "oldest_first": "slime_rl.buffer.filters:oldest_first",
        "freshest_first": "slime_rl.buffer.filters:freshest_first",
        "stalest_first": "slime_rl.buffer.filters:stalest_first",
        "by_reward_variance": "slime_rl.buffer.filters:by_reward_variance",
    },
)
DYNAMIC_FILTERS = ExtensionPoint(
    flag="--dynamic-filter-path",
    protocol=GroupFilter,
    builtins={
        "nonzero_std": "slime_rl.buffer.filters:nonzero_std",
        "reward_band": "slime_rl.buffer.filters:reward_band",
        "not_all_truncated": "slime_rl.buffer.filters:not_all_truncated",
    },
)
SAMPLE_FILTERS = ExtensionPoint(
    flag="--sample-filter-path",
    protocol=SampleFilter,
    builtins={
        "completed": "slime_rl.buffer.filters:completed",
        "distinct": "slime_rl.buffer.filters:distinct",
    },
)
CURRICULA = ExtensionPoint(flag="--curriculum-path", protocol=Curriculum, builtins={})
PROMPT_SOURCES = ExtensionPoint(
    flag="--data-source-path",
    protocol=PromptSource,
    builtins={"file": "slime_rl.buffer.sources:FilePromptSource"},
)


def stateful_policies(config: Config) -> dict[str, Stateful]:
    """Those of the run's filters that have a state to keep, by flag and value: another filter has another state."""
    options = config.buffer
    chosen = [
        (BUFFER_FILTERS, options.buffer_filter_path),
        (DYNAMIC_FILTERS, options.dynamic_filter_path),
        (SAMPLE_FILTERS, options.sample_filter_path),
    ]
    loaded = {f"{point.flag} {path}": point.load(path) for point, path in chosen if path is not None}
    return {flag: policy for flag, policy in loaded.items() if isinstance(policy, Stateful)}
