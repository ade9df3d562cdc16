"""How token losses become one number. Counted on the whole optimizer update before any split, so that

    loss = sum over t of w_t * loss_t

has the same value and gradient for every micro-batch size, packing, order and number of workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_rl.algorithms.batch import segment_sum
from slime_rl.config import Config


def token_weights(
    config: Config, *, mask: Tensor, sample_ids: Tensor, rollout_ids: Tensor, group_ids: Tensor
) -> Tensor:
    """Weight of each token of one optimizer update under `--loss-aggregation`.

    With n_x the unmasked tokens of sequence or prompt x, and S, P the sequences and prompts that have any:

        token-mean              1 / n_all
        seq-mean-token-mean     1 / (S * n_seq)          GRPO, DeepSeekMath (arXiv 2402.03300)
        seq-mean-token-sum      1 / S
        seq-mean-token-sum-norm 1 / (S * length)         Dr. GRPO (arXiv 2503.20783); length is --loss-norm-length
        prompt-mean-token-mean  1 / (P * n_prompt)       every prompt weighs the same however long its answers are

    Samples that share a `rollout_id` are one sequence. A fully masked sample adds nothing to any denominator.

    Args:
        mask: `[T]`, 1 = trained on.
        sample_ids: `[T]` int64 in 0..N-1.
        rollout_ids: `[N]` int64.
        group_ids: `[N]` int64.

    Returns:
        `[T]` float32, 0 on masked tokens; all 0 where no token is unmasked.
    """
    keep = (mask > 0).double()
    mode = config.algorithm.loss_aggregation
    owners = group_ids if mode == "prompt-mean-token-mean" else rollout_ids
    unique, owner_of_sample = torch.unique(owners, return_inverse=True)
    owner = owner_of_sample[sample_ids]
    tokens = segment_sum(keep, owner, len(unique))  # unmasked tokens of each sequence or prompt
    num_owners = (tokens > 0).sum().clamp(min=1)
    if mode == "token-mean":
        weights = keep / keep.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = keep / num_owners
    elif mode == "seq-mean-token-sum-norm":
        length = config.algorithm.loss_norm_length or config.sampling.max_response_len
        weights = keep / (num_owners * length)
    else:
        weights = keep / (num_owners * tokens.clamp(min=1)[owner])
    return weights.float()
