"""The critic's model: the policy's architecture with one number per token in place of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor

from slime_rl.trainer.model import unwrap


class ValueHead(torch.nn.Module):
    """hidden `[K, H]` -> values `[K]` float32, whatever the model's type; the same on every tensor-parallel worker.

    It starts at 0, so that the first advantages are those of REINFORCE and not of a random function.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))
        for parameter in self.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


def attach_value_head(models: list[Any], hidden_size: int, device: torch.device) -> None:
    """Put a value head where the output layer is, after the checkpoint's weights are in and before DDP."""
    for model in models:
        gpt = unwrap(model)
        gpt.share_embeddings_and_output_weights = False  # nothing to tie with any more
        if gpt.post_process:
            gpt.output_layer = ValueHead(hidden_size).to(device, next(gpt.parameters()).dtype)
