"""What to do about responses that run into the length limit (DAPO, arXiv 2503.14476, sections 3.4 and 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.config import Config


def overlong_penalty(config: Config, lengths: Tensor) -> Tensor:
    """Soft penalty on the last `--overlong-buffer-len` = B tokens below `--max-response-len` = M.

        0 for L <= M - B,   -penalty * (L - (M - B)) / B for M - B < L <= M,   -penalty beyond

    Args:
        lengths: `[N]` int64, response tokens of each sample.

    Returns:
        `[N]` float64, to be added to the rewards; 0 everywhere when no buffer is configured.
    """
    buffer = config.algorithm.overlong_buffer_len
    if buffer is None:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    excess = lengths.double() - (config.sampling.max_response_len - buffer)
    return -config.algorithm.overlong_penalty * (excess / buffer).clamp(0, 1)


def overlong_filter(config: Config, mask: Tensor, sample_ids: Tensor, truncated: Tensor) -> Tensor:
    """The loss mask without truncated responses when `--overlong-filter` is on, else the mask as it is.

    Masked before the denominators are counted, a truncated response weighs nothing in any aggregation; its reward still
    counts in its group's statistics.

    Args:
        mask: `[T]` float32.
        sample_ids: `[T]` int64.
        truncated: `[N]` bool.

    Returns:
        `[T]` float32.
    """
    if not config.algorithm.overlong_filter:
        return mask
    return torch.where(truncated[sample_ids], 0.0, mask)
