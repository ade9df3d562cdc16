from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_rl.trainer.families.rules import Columns, QueryKeyValue, Rows, Stacked, StackedInOne, Vocabulary, Whole

# Three key-value groups of two queries each, 4 channels: 24 query rows, 12 key and 12 value rows; 5 columns.
QKV = QueryKeyValue(("q", "k", "v"), groups=6, heads_per_group=2, head_dim=4)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


CASES: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "whole": (Whole("n"), tensors((5, 3))),
    "rows": (Rows("n"), tensors((12, 5))),
    "columns": (Columns("n"), tensors((5, 12))),
    "vocabulary_padded": (Vocabulary("n", 7), tensors((7, 5))),
    "gate_and_up": (Stacked(("g", "u")), tensors((12, 5), (12, 5))),
    "gate_and_up_bias": (Stacked(("g", "u")), tensors((12,), (12,))),
    "gate_and_up_in_one": (StackedInOne("gu"), tensors((24, 5))),
    "qkv": (QKV, tensors((48, 5), (24, 5), (24, 5))),
    "qkv_bias": (QKV, tensors((48,), (24,), (24,))),
    "qkv_in_one": (QueryKeyValue(("qkv",), 6, 2, 4), tensors((96, 5))),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_parts_of_all_workers_make_the_same_tensors_again(case: str, size: int) -> None:
    rule, sources = CASES[case]
    parts = [rule.shard(sources, rank, size) for rank in range(size)]
    back = rule.merge(parts)
    assert len(back) == len(rule.names) == len(sources)
    assert all(torch.equal(x, y) for x, y in zip(back, sources, strict=True))


@pytest.mark.parametrize("case", ["rows", "columns", "gate_and_up", "qkv"])
def test_each_worker_holds_its_share_only(case: str) -> None:
    rule, sources = CASES[case]
    whole, part = rule.shard(sources, 0, 1), rule.shard(sources, 1, 2)
    assert part.numel() * 2 == whole.numel()


def test_queries_lie_with_their_key_and_value() -> None:
    q, k, v = (torch.arange(n)[:, None].float() + base for n, base in ((48, 0), (24, 1000), (24, 2000)))
    second_group = QKV.shard([q, k, v], 0, 1)[16:32, 0].tolist()
    assert second_group == [*range(8, 16), *range(1004, 1008), *range(2004, 2008)]


def test_padding_of_the_vocabulary_is_zero_and_at_the_end() -> None:
    last = Vocabulary("n", 7).shard([torch.ones(7, 5)], 1, 2)
    assert last.shape == (4, 5)
    assert last[:3].eq(1).all() and last[3].eq(0).all()


def test_width_that_workers_cannot_share_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"up has 12 rows or columns, which 5"):
        Rows("up").shard([torch.ones(12, 5)], 0, 5)
