from __future__ import annotations

import random

import pytest

from slime_rl.data.packing import estimate_flops, fixed, pack, partition


def lengths_of(seed: int) -> tuple[list[int], int, random.Random]:
    """Lognormal lengths, as responses have, and a cap that some of them are over."""
    rng = random.Random(seed)
    cap = rng.randint(20, 400)
    return [min(int(rng.lognormvariate(4, 1)), 600) for _ in range(rng.randint(1, 120))], cap, rng


def test_no_micro_batch_is_over_the_cap_unless_a_single_sample_is() -> None:
    for seed in range(500):
        lengths, cap, _ = lengths_of(seed)
        batches = pack(lengths, cap)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(batch for batch in batches)
        assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= cap for batch in batches)


def test_min_batches_and_multiple_are_kept_within_the_cap() -> None:
    for seed in range(200):
        lengths, cap, rng = lengths_of(seed)
        lengths += [1] * 16
        wanted, multiple = rng.randint(1, 16), rng.choice([1, 2, 4])
        batches = pack(lengths, cap, min_batches=wanted, multiple=multiple)
        assert len(batches) >= wanted
        assert len(batches) % multiple == 0
        assert all(len(b) == 1 or 0 < sum(lengths[i] for i in b) <= cap for b in batches)
        assert batches == pack(lengths, cap, min_batches=wanted, multiple=multiple)


def test_two_ranks_agree_on_a_number_of_micro_batches() -> None:
    long, short = [90] * 6, [30] * 6
    count = max(len(pack(long, 100)), len(pack(short, 100)))
    assert len(pack(long, 100, min_batches=count)) == len(pack(short, 100, min_batches=count)) == 6


def test_fewest_micro_batches_and_even_cost() -> None:
    assert len(pack([50, 50, 50, 50], 100)) == 2
    lengths = [random.Random(1).randint(50, 150) for _ in range(400)]
    batches = pack(lengths, 2000)
    assert len(batches) <= -(-sum(lengths) // 2000) + 1
    costs = [sum(estimate_flops(lengths[i]) for i in b) for b in batches]
    assert max(costs) / min(costs) < 1.05


def test_a_sample_over_the_cap_is_alone() -> None:
    assert pack([5, 500, 5], 100) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "0 samples cannot fill 1"),
        ([1, 2], {"min_batches": 3}, "2 samples cannot fill 3"),
        ([1, 2, 3], {"min_batches": 3, "multiple": 2}, "3 samples cannot fill 4"),
        ([-1], {}, "negative length"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, 10, **options)


def test_zero_lengths_leave_no_micro_batch_empty() -> None:
    assert all(pack([0, 0, 0, 5], 10, min_batches=4))


def test_fixed_batches_are_even_and_at_least_min_batches() -> None:
    assert fixed([1] * 7, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(b) for b in fixed([1] * 7, 3, min_batches=4)] == [1, 2, 2, 2]
    with pytest.raises(ValueError, match="cannot fill"):
        fixed([1] * 2, 1, min_batches=3)


def test_partition_has_even_counts_and_even_costs() -> None:
    for seed in range(100):
        lengths, _, rng = lengths_of(seed)
        parts = partition(lengths, k := rng.randint(1, 8))
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert len(parts) == k
        counts = [len(p) for p in parts]
        assert max(counts) - min(counts) <= 1
    costs = [sum([9, 8, 7, 6, 5, 4][i] for i in part) for part in partition([9, 8, 7, 6, 5, 4], 2)]
    assert sorted(costs) == [19, 20]


def test_flops_grow_faster_than_length() -> None:
    assert estimate_flops(2000) > 2 * estimate_flops(1000)
    assert estimate_flops(1000, hidden_size=64) / estimate_flops(1000, hidden_size=8192) < 64 / 8192 * 4
