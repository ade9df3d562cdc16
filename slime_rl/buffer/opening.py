"""The buffer that a run's flags ask for, with its prompt source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_rl.buffer.dumps import DumpedBuffer
from slime_rl.buffer.policies import BUFFERS, PROMPT_SOURCES
from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, LengthLimited, PromptSource
from slime_rl.types import Prompt


def open_buffer(config: Config, encode: Callable[[Prompt], Sequence[int]]) -> DataBuffer:
    """Read and check the prompts (`encode` renders them, for the length limit) and make the buffer over them.

    Raises:
        ValueError: bad data, or a plugin that does not fit.
    """
    if config.rollout.load_rollouts is not None:
        return DumpedBuffer(config)
    source: PromptSource = PROMPT_SOURCES.load(config.data.data_source_path)(config)
    if isinstance(source, LengthLimited):
        source.limit_lengths(encode)
    return BUFFERS.load(config.buffer.buffer_path)(config, source)
