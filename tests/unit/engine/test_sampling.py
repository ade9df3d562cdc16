from __future__ import annotations

import torch

from slime_rl.engine.cpu.sampling import inverse, sample, seeded_uniform


def test_every_token_is_drawn_as_often_as_its_probability_says() -> None:
    probs = torch.tensor([0.0, 0.125, 0.5, 0.0, 0.25, 0.125, 0.0])
    grid = torch.arange(800, dtype=torch.float64) / 800
    counts = inverse(probs.expand(800, 7), grid).bincount(minlength=7)
    assert counts.tolist() == [0, 100, 400, 0, 200, 100, 0]


def test_no_number_draws_a_token_of_probability_zero() -> None:
    probs = torch.tensor([[0.0, 1e-30, 0.3, 0.0, 0.7, 0.0]])
    below_one = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    assert inverse(probs, torch.zeros(1, dtype=torch.float64)).tolist() == [1]
    assert inverse(probs, below_one[None]).tolist() == [4]
    assert inverse(probs * 3.7, below_one[None]).tolist() == [4], "weights need not sum to 1"


def test_a_large_vocabulary_keeps_its_rare_tokens() -> None:
    """In float32 the sums would swallow what is below 6e-8 of the whole."""
    probs = torch.full((1, 150_000), 1e-9)
    probs[0, 0] = 1.0
    total = probs.double().sum()
    at = (1.0 + 1e-9 * 70_000.5) / total
    assert inverse(probs, at[None]).item() == 70_001


def test_a_seed_and_a_position_give_one_token_whoever_else_is_in_the_batch() -> None:
    probs = torch.softmax(torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)), -1)
    seeds, positions = torch.tensor([3, 3, 4, 2**40, 0]), torch.tensor([7, 8, 7, 7, 7])
    together = sample(probs, seeds, positions)
    alone = [sample(probs[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert together.dtype == torch.int32
    assert torch.equal(together, sample(probs, seeds.to(torch.uint64), positions))


def test_seeded_numbers_are_uniform_and_free_of_their_neighbours() -> None:
    numbers = seeded_uniform(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = (numbers * 10).long().bincount(minlength=10)
    assert ((counts - 1000).abs() < 5 * 30).all(), "5 standard errors"
    grid = numbers.view(100, 100) - 0.5
    neighbours = [(grid[1:] * grid[:-1]).mean(), (grid[:, 1:] * grid[:, :-1]).mean()]
    assert max(abs(float(x)) for x in neighbours) < 5 / 12 / 99


def test_without_a_seed_the_generator_decides() -> None:
    probs = torch.full((1000, 4), 0.25)
    torch.manual_seed(0)
    first = sample(probs)
    assert not torch.equal(first, sample(probs))
    torch.manual_seed(0)
    assert torch.equal(first, sample(probs))
    assert ((first.bincount(minlength=4) - 250).abs() < 5 * 14).all()
