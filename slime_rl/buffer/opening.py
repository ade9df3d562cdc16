"""The buffer that a run's flags ask for, with its prompt source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_rl.buffer.dumps import DumpedBuffer
from slime_rl.buffer.policies import BUFFERS, PROMPT_SOURCES
from slime_rl.buffer.sources.own import OwnSource
from slime_rl.config import Config
from slime_rl.protocols import DataBuffer, LengthLimited, PromptSource
from slime_rl.registry import own_code
from slime_rl.types import Prompt


def open_buffer(config: Config, encode: Callable[[Prompt], Sequence[int]]) -> DataBuffer:
    """Read and check the prompts (`encode` renders them, for the length limit) and make the buffer over them.

    Raises:
        ValueError: bad data, or a plugin that does not fit.
    """
    if config.rollout.load_rollouts is not None:
        return DumpedBuffer(config)
    path = config.data.data_source_path
    make = PROMPT_SOURCES.load(path)
    if path in PROMPT_SOURCES.builtins:
        source: PromptSource = make(config)
    else:
        with own_code(f"--data-source-path {path}", ", when it was made"):
            source = make(config)
        source = OwnSource(source, f"--data-source-path {path}")
    if isinstance(source, LengthLimited):
        source.limit_lengths(encode)
    name = config.buffer.buffer_path
    make_buffer = BUFFERS.load(name)
    if name in BUFFERS.builtins:
        return make_buffer(config, source)
    with own_code(f"--buffer-path {name}", ", when it was made"):
        return make_buffer(config, source)
