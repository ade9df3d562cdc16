"""Batches with a declared schema: what crosses from rollout to training, field by field.

Shape letters: N samples, L tokens of a sample (prompt and response), R response tokens.

    groups ──rollout_batch_from_groups──► RolloutBatch ──split_for_data_parallel──► one RolloutBatch per DP rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from slime_rl.data.episodes import role_of
from slime_rl.data.packing import DEFAULT_HIDDEN_SIZE, estimate_flops, partition
from slime_rl.data.proto import DataProto
from slime_rl.data.ragged import Ragged
from slime_rl.types import Group, Sample, Status


@dataclass(frozen=True)
class Field:
    """One declared field of a batch."""

    name: str
    dtype: torch.dtype
    kind: Literal["dense", "ragged"]
    doc: str


class SchemaBatch(DataProto):
    """A DataProto whose fields and meta keys are declared and checked whenever one is made; more fields are allowed."""

    schema: ClassVar[tuple[Field, ...]] = ()
    meta_schema: ClassVar[tuple[str, ...]] = ()

    def check_consistency(self) -> None:
        super().check_consistency()
        name = type(self).__name__
        for field in self.schema:
            if field.name not in self.tensors:
                raise ValueError(f"{name} has no {field.name!r} ({field.doc}); it has {sorted(self.keys())}")
            value = self.tensors[field.name]
            kind = "ragged" if isinstance(value, Ragged) else "dense"
            if kind != field.kind or value.dtype != field.dtype:
                wanted, got = f"{field.kind} {field.dtype}", f"{kind} {value.dtype}"
                raise ValueError(f"{name}: {field.name!r} ({field.doc}) must be {wanted}, got {got}")
            if isinstance(value, Tensor) and value.ndim != 1:
                raise ValueError(f"{name}: {field.name!r} must be [N], got {tuple(value.shape)}")
        if missing := [key for key in self.meta_schema if key not in self.meta_info]:
            raise ValueError(f"{name}: meta_info has no {missing}; it has {sorted(self.meta_info)}")

    @classmethod
    def describe(cls) -> str:
        """The schema as lines of text."""
        return "\n".join(f"{f.name:<18} {f.kind:<6} {f.dtype!s:<14} {f.doc}" for f in cls.schema)

    def ragged(self, name: str) -> Ragged:
        """A ragged field, typed as one."""
        value = self.tensors[name]
        if not isinstance(value, Ragged):
            raise ValueError(f"{name!r} is dense")
        return value

    def dense(self, name: str) -> Tensor:
        """A dense field, typed as one."""
        value = self.tensors[name]
        if isinstance(value, Ragged):
            raise ValueError(f"{name!r} is ragged")
        return value


class RolloutBatch(SchemaBatch):
    """Samples of one step, or one data-parallel rank's share of them, ready to train on.

    meta_info: `step`, `weight_version` (of the policy before the step), `num_samples` (of the global batch).
    """

    schema = (
        Field("tokens", torch.int64, "ragged", "[L] prompt and response tokens"),
        Field("prompt_lengths", torch.int64, "dense", "[N] tokens of the prompt"),
        Field("loss_mask", torch.float32, "ragged", "[R] 1 = trained on"),
        Field("rollout_log_probs", torch.float32, "ragged", "[R] the engine's, natural log"),
        Field("weight_versions", torch.int32, "ragged", "[R] that sampled each token, -1 where no model did"),
        Field("rewards", torch.float32, "dense", "[N] one per sample"),
        Field("group_ids", torch.int64, "dense", "[N] 0..G-1 in order of appearance in the global batch"),
        Field(
            "rollout_ids", torch.int64, "dense", "[N] 0..E-1 in order of appearance; samples of one episode share it"
        ),
        Field("sample_ids", torch.int64, "dense", "[N] position in the global batch"),
        Field("truncated", torch.bool, "dense", "[N] whether the response ran into a length limit"),
        Field("update_ids", torch.int64, "dense", "[N] optimizer update of the step that trains on it"),
    )
    meta_schema = ("step", "weight_version", "num_samples")

    def check_consistency(self) -> None:
        """Beyond the schema: response fields have as many tokens as `tokens` has beyond the prompt."""
        super().check_consistency()
        response = self.total_lengths - self.tensors["prompt_lengths"].cpu()  # type: ignore[union-attr]
        for name in ("loss_mask", "rollout_log_probs", "weight_versions"):
            lengths: Tensor = self.tensors[name].lengths  # type: ignore[union-attr]
            if not torch.equal(lengths, response):
                row = int((lengths != response).nonzero()[0])
                have, want = int(lengths[row]), int(response[row])
                raise ValueError(f"RolloutBatch: {name!r} of row {row} has {have} tokens, its response has {want}")

    @property
    def total_lengths(self) -> Tensor:  # [N] int64
        """Tokens of each sample, prompt included."""
        return self.ragged("tokens").lengths

    @property
    def response_lengths(self) -> Tensor:  # [N] int64
        return self.ragged("loss_mask").lengths


class TokenFields(SchemaBatch):
    """Numbers of response tokens on their way between workers: each kind a ragged float32 field, `[R]` a sample.

    Which samples are together is the sender's affair; `sample_ids` say which they are.
    """

    schema = (Field("sample_ids", torch.int64, "dense", "[N] position in the global batch"),)

    @classmethod
    def of(cls, batch: RolloutBatch, fields: Mapping[str, Tensor], meta_info: Mapping[str, Any]) -> TokenFields:
        """`fields` are `[t]` each, for the samples of `batch` in its order."""
        packed = {name: Ragged.from_lengths(value.cpu(), batch.response_lengths) for name, value in fields.items()}
        return cls({"sample_ids": batch.dense("sample_ids").cpu(), **packed}, None, meta_info)


def fields_of_batch(parts: Sequence[TokenFields], batch: RolloutBatch) -> dict[str, Tensor]:
    """`[t]` each, for the samples of `batch` in its order, from whatever parts hold them.

    Raises:
        ValueError: a kind of numbers misses a sample, or has not one for each of its tokens.
    """
    wanted, found = batch.dense("sample_ids"), {}
    for name in dict.fromkeys(key for part in parts for key in part.tensors if key != "sample_ids"):
        holders = [part for part in parts if name in part]
        ids = torch.cat([part.dense("sample_ids") for part in holders])
        row_of = torch.full((max(int(ids.max()), int(wanted.max())) + 1,), -1)
        row_of[ids] = torch.arange(len(ids))
        rows = row_of[wanted]
        if bool((rows < 0).any()):
            raise ValueError(f"{name!r} is missing for the samples {wanted[rows < 0].tolist()[:8]}")
        values = Ragged.concat([part.ragged(name) for part in holders])[rows]
        if not torch.equal(values.lengths, batch.response_lengths):
            bad = wanted[values.lengths != batch.response_lengths].tolist()
            raise ValueError(f"{name!r} has another number of tokens than the samples {bad[:8]}")
        found[name] = values.values
    return found


def rollout_batch_from_groups(
    groups: Sequence[Group], step: int, weight_version: int, num_updates: int = 1
) -> RolloutBatch:
    """The global batch of a step: samples in the order of the groups, spread over updates in contiguous blocks.

    It has `baseline_rewards [N]` float32, too, where every sample's reward_info has a `baseline_reward` (remax).

    Groups stay whole in one update when their number divides by `num_updates`; otherwise blocks of samples are equal.
    Where agents play several roles, each role of a group is a group for the advantages.

    Raises:
        ValueError: no samples, a sample without reward or response, or samples that do not divide over the updates.
    """
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        _check_trainable(sample)
    if samples and not any(sample.num_trained_tokens for sample in samples):
        raise ValueError(f"step {step} has nothing to train on: the loss masks of its {len(samples)} samples are all 0")
    group_of = [number for number, group in enumerate(groups) for _ in group.samples]
    # Numbered anew, group by group: an own rollout function may give two groups the same rollout_id.
    episodes: dict[tuple[int, int], int] = {}
    for pair in zip(group_of, (sample.rollout_id for sample in samples), strict=True):
        episodes.setdefault(pair, len(episodes))
    tensors: dict[str, Tensor | Ragged] = {
        "tokens": Ragged.from_list([s.tokens for s in samples], torch.int64),
        "prompt_lengths": torch.tensor([s.prompt_length for s in samples], dtype=torch.int64),
        "loss_mask": Ragged.from_list([s.loss_mask for s in samples], torch.float32),
        "rollout_log_probs": Ragged.from_list([s.rollout_log_probs for s in samples], torch.float32),
        "weight_versions": Ragged.from_list([s.weight_versions for s in samples], torch.int32),
        "rewards": torch.tensor([s.reward for s in samples], dtype=torch.float32),
        "group_ids": torch.tensor(_role_groups(samples, group_of), dtype=torch.int64),
        "rollout_ids": torch.tensor([episodes[g, s.rollout_id] for g, s in zip(group_of, samples, strict=True)]),
        "sample_ids": torch.arange(len(samples)),
        "truncated": torch.tensor([s.status is Status.TRUNCATED for s in samples], dtype=torch.bool),
        "update_ids": _update_ids(len(groups), group_of, num_updates),
    }
    baselines = [s.reward_info.get("baseline_reward") for s in samples]
    if all(baseline is not None for baseline in baselines):
        tensors["baseline_rewards"] = torch.tensor(baselines, dtype=torch.float32)
    meta: dict[str, Any] = {"step": step, "weight_version": weight_version, "num_samples": len(samples)}
    return RolloutBatch(tensors, None, meta)


def _role_groups(samples: Sequence[Sample], group_of: list[int]) -> list[int]:
    """Numbers from 0, one for each role of each group: the sides of a game are not compared with each other."""
    numbers: dict[tuple[int, str], int] = {}
    pairs = zip(group_of, map(role_of, samples), strict=True)
    return [numbers.setdefault(pair, len(numbers)) for pair in pairs]


def _check_trainable(sample: Sample) -> None:
    missing = "reward" if sample.reward is None else "response" if sample.response_length == 0 else None
    if missing is not None:
        where = f"sample {sample.index} (group {sample.group_index})"
        raise ValueError(f"{where} has no {missing}, so it cannot be trained on")


def _update_ids(num_groups: int, group_of: list[int], num_updates: int) -> Tensor:
    num_samples = len(group_of)
    if num_samples == 0:
        raise ValueError("a step needs at least one sample, got none")
    if num_updates < 1:
        raise ValueError(f"num_updates must be > 0, got {num_updates}")
    if num_groups % num_updates == 0:
        return torch.tensor(group_of, dtype=torch.int64) // (num_groups // num_updates)
    if num_samples % num_updates == 0:
        return torch.arange(num_samples) // (num_samples // num_updates)
    counts = f"{num_groups} groups nor {num_samples} samples"
    raise ValueError(f"--num-updates-per-rollout {num_updates} divides neither {counts}")


def split_for_data_parallel(
    batch: RolloutBatch, dp_size: int, *, hidden_size: int = DEFAULT_HIDDEN_SIZE
) -> list[RolloutBatch]:
    """One batch per rank with samples of every update, balanced by estimated cost, ordered by `sample_ids`.

    Within an update the ranks' numbers of samples differ by at most 1.

    Raises:
        ValueError: an update with fewer samples than ranks, so that one of them would have nothing to do.
    """
    if dp_size < 1:
        raise ValueError(f"dp_size must be > 0, got {dp_size}")
    if dp_size == 1:
        return [batch.select_rows(batch.dense("sample_ids").argsort(stable=True))]
    rows_of_rank: list[list[int]] = [[] for _ in range(dp_size)]
    costs = [estimate_flops(n, hidden_size) for n in batch.total_lengths.tolist()]
    load = [0] * dp_size
    for update in batch.dense("update_ids").unique().tolist():
        rows = (batch.dense("update_ids") == update).nonzero().squeeze(1).tolist()
        if len(rows) < dp_size:
            raise ValueError(
                f"update {update} has {len(rows)} samples for {dp_size} data-parallel ranks; raise "
                "--rollout-batch-size or --n-samples-per-prompt, or lower --num-updates-per-rollout or "
                "--train-num-workers"
            )
        parts = partition([costs[row] for row in rows], dp_size)
        heaviest_first = sorted(parts, key=lambda part: (-sum(costs[rows[i]] for i in part), part))
        for rank, part in zip(sorted(range(dp_size), key=lambda r: (load[r], r)), heaviest_first, strict=True):
            rows_of_rank[rank] += [rows[i] for i in part]
            load[rank] += sum(costs[rows[i]] for i in part)
    sample_ids = batch.dense("sample_ids").tolist()
    return [batch.select_rows(sorted(rows, key=lambda row: sample_ids[row])) for rows in rows_of_rank]
