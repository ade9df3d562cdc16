from __future__ import annotations

import pytest
import torch

from slime_rl.trainer.head import HeadSpec, head_spec, log_probs_and_entropy

K, H, V = 7, 5, 11


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(K, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V + 2, H, generator=generator).to(dtype).requires_grad_()  # two rows of padding
    return hidden, weight, torch.randint(0, V, (K,), generator=generator)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (hidden.double() @ weight[:V].double().T / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kept_bytes", [0, 1_000_000])
@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (7, 11), (100, 3), (2, 100)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_a_plain_softmax(
    tile: tuple[int, int], temperature: float, kept_bytes: int
) -> None:
    spec = HeadSpec(None, 1, 0, V, temperature, tile, kept_bytes)
    hidden, weight, targets = make_inputs()
    mix = torch.linspace(-1, 2, K)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, spec)
    (log_probs * mix + entropy * mix.flip(0)).sum().backward()
    got = (log_probs, entropy, hidden.grad, weight.grad)
    hidden2, weight2, _ = make_inputs()
    want_log_probs, want_entropy = plain(hidden2, weight2, targets, temperature)
    (want_log_probs * mix + want_entropy * mix.flip(0)).sum().backward()
    for have, want in zip(got, (want_log_probs, want_entropy, hidden2.grad, weight2.grad), strict=True):
        assert have is not None and want is not None
        torch.testing.assert_close(have, want.float(), rtol=1e-5, atol=1e-6)


def test_gradient_of_log_probs_alone_leaves_entropy_out() -> None:
    spec = head_spec(None, 0, 1, V, 1.0)
    hidden, weight, targets = make_inputs()
    log_probs_and_entropy(hidden, weight, targets, spec)[0].sum().backward()
    hidden2, weight2, _ = make_inputs()
    plain(hidden2, weight2, targets, 1.0)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, hidden2.grad, rtol=1e-5, atol=1e-6)
    assert weight.grad is not None and not weight.grad[V:].any()  # padding rows take no part


def test_no_response_tokens_give_empty_results_and_zero_gradients() -> None:
    spec = head_spec(None, 0, 1, V, 1.0)
    hidden, weight, targets = make_inputs()
    log_probs, entropy = log_probs_and_entropy(hidden[:0], weight, targets[:0], spec)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_bfloat16_weights_are_computed_in_float32_beyond_the_product() -> None:
    spec = head_spec(None, 0, 1, V, 1.0)
    hidden, weight, targets = make_inputs(torch.bfloat16)
    log_probs, _ = log_probs_and_entropy(hidden, weight, targets, spec)
    assert log_probs.dtype == torch.float32
    logits = (hidden.detach() @ weight.detach()[:V].T).float()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])


@pytest.mark.parametrize(("size", "rows"), [(1, [11]), (2, [6, 5]), (4, [3, 3, 3, 2]), (8, [2, 2, 2, 2, 2, 1, 0, 0])])
def test_vocabulary_is_spread_without_counting_padding(size: int, rows: list[int]) -> None:
    specs = [head_spec(None, rank, size, V, 1.0) for rank in range(size)]
    assert [spec.num_tokens for spec in specs] == rows
    assert [spec.first_token for spec in specs] == [rank * -(-V // size) for rank in range(size)]
