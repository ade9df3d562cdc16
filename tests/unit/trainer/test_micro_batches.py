"""Packing for context and sequence parallelism, and the global batch; no process group is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.tiny_models import VOCAB_SIZE
from benchmarks.trainer_cases import make_batch, make_config
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.ragged import Ragged
from slime_rl.trainer.device import prepare_process, resolve_device

prepare_process(resolve_device("cpu"), 0, 1, 1)

from slime_rl.trainer.distributed import Axis, Layout  # noqa: E402  (after the stand-ins)
from slime_rl.trainer.gather import gather_global  # noqa: E402
from slime_rl.trainer.packing import (  # noqa: E402
    make_micro_batch,
    make_shared_micro_batch,
    padded_lengths,
    split_rows,
)
from slime_rl.trainer.sequences import Sequences  # noqa: E402
from slime_rl.trainer.shard import Shard, make_shard  # noqa: E402
from slime_rl.trainer.shared_prompts import num_tokens, prompt_families  # noqa: E402

CPU = torch.device("cpu")


def make_layout(cp: int = 1, cp_rank: int = 0, tp: int = 1, pp: int = 1, vpp: int | None = None) -> Layout:
    one = Axis(None, 1, 0)
    return Layout(
        tp=Axis(None, tp, 0), pp=Axis(None, pp, 0), cp=Axis(None, cp, cp_rank), dp=one, dp_cp=one, vpp_size=vpp
    )


def shard_of(config: Any, batch: Any) -> Shard:
    state: Any = SimpleNamespace(config=config, device=CPU, vocab_size=VOCAB_SIZE)
    return make_shard(state, batch)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text("{}")
    return make_config(tmp_path)


def test_every_response_token_is_predicted_by_the_token_before_it(config: Any) -> None:
    batch = make_batch()
    shard = shard_of(config, batch)
    rows = [7, 2, 5]
    micro = make_micro_batch(0, rows, shard.sequences, make_layout(), False, CPU)
    flat = torch.cat([batch.ragged("tokens")[row] for row in rows])
    assert torch.equal(micro.input_ids[0], flat)
    responses = [batch.ragged("tokens")[row][int(batch.dense("prompt_lengths")[row]) :] for row in rows]
    assert torch.equal(micro.targets, torch.cat(responses))
    assert torch.equal(micro.input_ids[0, micro.predict_at + 1], micro.targets)
    masks = torch.cat([batch.ragged("loss_mask")[row] for row in rows])
    assert torch.equal(batch.ragged("loss_mask").values[micro.token_index], masks)
    assert micro.sample_ids.bincount().tolist() == [len(response) for response in responses]


def test_a_shared_prompt_is_in_the_pass_once(config: Any) -> None:
    shard = shard_of(config, make_batch())
    sequences, rows = shard.sequences, [0, 1, 2, 4]  # a group of three and one of another
    micro = make_shared_micro_batch(0, rows, sequences, make_layout(tp=4), True)
    plain = make_micro_batch(0, rows, sequences, make_layout(), False, CPU)
    assert torch.equal(micro.targets, plain.targets)
    assert torch.equal(micro.token_index, plain.token_index) and torch.equal(micro.sample_ids, plain.sample_ids)
    prompts = len(sequences.prompt(0)) + len(sequences.prompt(4))
    needed = prompts + sum(sequences.response_length(row) - 1 for row in rows)
    assert micro.input_ids.size(1) == -(-needed // 4) * 4
    # Each token sees what it sees in its own sequence: the keys of its block are that sequence so far.
    params, at = micro.packed, 0
    seen: dict[int, Any] = {}
    queries = iter(range(micro.input_ids.size(1)))
    for count, num_queries, num_keys in params.blocks:
        for _ in range(count):
            keys, at = params.key_order[at : at + num_keys], at + num_keys
            for i in range(num_queries):
                seen[next(queries)] = keys[: num_keys - num_queries + i + 1]
    predicted = iter(micro.predict_at.tolist())
    for row in rows:
        whole = torch.cat([sequences.prompt(row), sequences.response(row)])
        for length in range(len(sequences.prompt(row)), len(whole)):
            keys = seen[next(predicted)]
            assert torch.equal(micro.input_ids[0, keys], whole[:length])
            assert torch.equal(micro.position_ids[0, keys], torch.arange(length))


def test_families_keep_the_cap_and_lose_no_row(config: Any) -> None:
    sequences = shard_of(config, make_batch(groups=3, samples=6)).sequences
    rows = list(range(18))
    for cap in (1, 40, 90, 10_000):
        units = prompt_families(rows, sequences, cap)
        assert sorted(row for unit in units for row in unit) == rows
        for unit in units:
            assert len({tuple(sequences.prompt(row).tolist()) for row in unit}) == 1
            assert len(unit) == 1 or num_tokens(unit, sequences) <= cap
    assert [len(unit) for unit in units] == [6, 6, 6]


@pytest.mark.parametrize("cap", [0, 1, 3, 100])
def test_families_of_responses_of_one_token(cap: int) -> None:
    """Such a response adds no token to the pass of its prompt: 1 2 | 9 and 3 | 9 and 1 2 | 9 and 3 | 9."""
    sequences = Sequences(
        tokens=torch.tensor([1, 2, 9, 3, 9, 1, 2, 9, 3, 9]),
        offsets=torch.tensor([0, 3, 5, 8, 10]),
        prompt_lengths=[2, 1, 2, 1],
        response_offsets=torch.arange(5),
    )
    units = prompt_families([0, 1, 2, 3], sequences, cap)
    expected = {0: [[0], [1], [2], [3]], 1: [[0], [1, 3], [2]]}.get(cap, [[0, 2], [1, 3]])
    assert units == expected
    assert [num_tokens(unit, sequences) for unit in units] == [sequences.prompt_lengths[unit[0]] for unit in units]


@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallel_workers_own_every_response_token_once(config: Any, cp: int) -> None:
    shard = shard_of(config, make_batch())
    rows = [0, 4, 9]
    whole = make_micro_batch(0, rows, shard.sequences, make_layout(), False, CPU)
    targets = torch.full_like(whole.targets, -1)
    sizes = set()
    for rank in range(cp):
        part = make_micro_batch(0, rows, shard.sequences, make_layout(cp, rank), False, CPU)
        assert (targets[part.owned] == -1).all()
        targets[part.owned] = part.targets
        sizes.add(part.input_ids.size(1))
    assert torch.equal(targets, whole.targets)
    assert len(sizes) == 1


def test_sequence_parallel_pads_to_a_multiple_of_the_workers() -> None:
    assert padded_lengths([5, 7], make_layout(tp=4), False) == [5, 7]
    assert padded_lengths([5, 8], make_layout(tp=4), True) == [5, 11]
    assert padded_lengths([5, 6], make_layout(cp=2, tp=4), True) == [8, 8]


def test_empty_micro_batch_keeps_the_workers_in_step(config: Any) -> None:
    shard = shard_of(config, make_batch())
    micro = make_micro_batch(3, [], shard.sequences, make_layout(cp=2, tp=2), True, CPU)
    assert micro.num_samples == 0 and len(micro.targets) == 0
    assert micro.input_ids.size(1) % 2 == 0


def split(rows: list[int], lengths: list[int], layout: Layout, **train: Any) -> list[list[int]]:
    settings: Any = SimpleNamespace(**{"max_tokens_per_worker": 10, "micro_batch_size": None} | train)
    units, sizes, splits = [[row] for row in rows], [lengths[row] for row in rows], layout.tp.size > 1
    return split_rows(units, sizes, settings, layout, splits, 64, CPU)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_rl.trainer.packing.reduce_max", lambda value, axis, device: value)


def test_token_cap_is_kept_and_no_row_is_lost(alone: None) -> None:
    lengths = [3, 9, 4, 20, 5, 5, 1]
    batches = split([0, 1, 3, 4, 5, 6], lengths, make_layout())
    assert sorted(row for batch in batches for row in batch) == [0, 1, 3, 4, 5, 6]
    assert all(sum(lengths[row] for row in batch) <= 10 or batch == [3] for batch in batches)


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (1, 2), (2, 2), (1, 3)])
def test_token_cap_holds_with_the_tokens_that_splitting_adds(alone: None, cp: int, tp: int) -> None:
    lengths, layout = [5] * 7 + [3, 7], make_layout(cp=cp, tp=tp)
    for cap in range(8, 32):
        batches = split(list(range(9)), lengths, layout, max_tokens_per_worker=cap)
        assert sorted(row for batch in batches for row in batch) == list(range(9))
        for batch in batches:
            padded = padded_lengths([lengths[row] for row in batch], layout, tp > 1)
            assert sum(padded) // cp <= cap or len(batch) == 1


def test_interleaved_stages_get_rounds_of_micro_batches(alone: None) -> None:
    assert len(split([0, 1, 2], [10, 10, 10], make_layout(pp=2, vpp=2))) == 4


def test_worker_with_fewer_samples_fills_up_with_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_rl.trainer.packing.reduce_max", lambda value, axis, device: 3)
    assert split([0, 1], [4, 4], make_layout()) == [[0], [1], []]
    assert split([], [4, 4], make_layout()) == [[], [], []]


def test_global_batch_does_not_depend_on_the_workers_order(config: Any) -> None:
    config = config.with_sections(train=replace(config.train, num_updates_per_rollout=2))
    batch, dp = make_batch(updates=2), Axis(None, 1, 0)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    whole, mixed = (
        gather_global(shard, {"mask": shard.mask, "rollout_log_probs": shard.rollout_log_probs}, len(batch), dp)
        for shard in (shard_of(config, batch), shard_of(config, batch.select_rows(order)))
    )
    for name, values in whole.tokens.items():
        assert torch.equal(values, mixed.tokens[name])
    assert torch.equal(whole.samples["rewards"], mixed.samples["rewards"])
    own = mixed.tokens["rollout_log_probs"][mixed.own_tokens]
    assert torch.equal(own, batch.select_rows(order).ragged("rollout_log_probs").values)
    weights, _ = whole.per_update(config, None)
    first = whole.integers["update_ids"][whole.sample_of_token] == 0
    assert float(weights[first].sum()) == pytest.approx(1.0, rel=1e-6)
    assert float(weights[~first].sum()) == pytest.approx(1.0, rel=1e-6)


def test_missing_samples_are_noticed(config: Any) -> None:
    shard = shard_of(config, make_batch().select_rows([0, 1, 3]))
    with pytest.raises(ValueError, match=r"sample_ids of the workers must be 0..11"):
        gather_global(shard, {"mask": shard.mask}, 12, Axis(None, 1, 0))


def with_value(batch: RolloutBatch, name: str, sample: int, value: float) -> RolloutBatch:
    """The same with another number at the last token of a sample, or in a field that has one per sample."""
    field = batch.tensors[name]
    if isinstance(field, Ragged):
        values = field.values.clone()
        values[int(field.offsets[sample + 1]) - 1] = value
        changed: Any = Ragged(values, field.offsets)
    else:
        changed = field.clone()
        changed[sample] = value
    return RolloutBatch({**batch.tensors, name: changed}, None, batch.meta_info)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", VOCAB_SIZE, f"sample 5: tokens must be 0..{VOCAB_SIZE - 1}.*got {VOCAB_SIZE}"),
        ("tokens", -1, "sample 5: tokens must be .* got -1"),
        ("loss_mask", torch.nan, "sample 5: loss_mask must be 0 or 1, got nan"),
        ("loss_mask", -1, "sample 5: loss_mask must be 0 or 1, got -1"),
        ("loss_mask", 0.5, "sample 5: loss_mask must be 0 or 1, got 0.5"),
        ("update_ids", 1, r"sample 5: update_ids must be 0\.\.0 \(--num-updates-per-rollout\), got 1"),
        ("update_ids", -1, "sample 5: update_ids must be .* got -1"),
    ],
)
def test_values_outside_their_range_are_refused(config: Any, name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"step 0, {message}"):
        shard_of(config, with_value(make_batch(), name, 5, value))
