"""`--buffer-path ledger`: the data buffer. A ledger says where each group stands, a store holds what groups carry.

    source ──next_prompts──► reserve ──► (rollout) ──► admit ──► take(step) ──► (training) ──► commit(step)
                                ▲            │ requeue / drop      ▲
                                └────────────┘                     └── --buffer-filter-path chooses

Saved state is taken between calls: what was reserved waits again after a resume, what a step had taken is taken by that
step again.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from slime_rl.buffer.filters import GroupSummary, Ranking, summarise
from slime_rl.buffer.judging import judge_groups
from slime_rl.buffer.keepable import check_and_weigh
from slime_rl.buffer.ledger import Ledger, State
from slime_rl.buffer.payloads import PayloadStore
from slime_rl.buffer.policies import BUFFER_FILTERS, stateful_policies
from slime_rl.buffer.ranked import RankedGroups
from slime_rl.buffer.replay import ReplayPool
from slime_rl.buffer.saved_parts import part_of_state, read_numbering, read_payloads, read_promised, read_records
from slime_rl.config import Config
from slime_rl.data.codec import decode, encode
from slime_rl.protocols import BufferFilter, CountsSkippedRows, PromptSource, Stateful
from slime_rl.registry import own_code
from slime_rl.types import Group, Prompt, Sample

FORMAT = 3
log = logging.getLogger(__name__)


class _Record(NamedTuple):
    """What a group without tokens is made from again."""

    source_index: int
    epoch: int
    attempts: int


class LedgerBuffer:
    """Implements `protocols.DataBuffer`; see there for each method. Used by one thread."""

    def __init__(self, config: Config, source: PromptSource) -> None:
        self.config, self.source = config, source
        self.filter: BufferFilter = BUFFER_FILTERS.load(config.buffer.buffer_filter_path)
        self.policies = stateful_policies(config)
        self.ledger = Ledger()
        folder = config.buffer.buffer_spill_dir or str(config.run_dir / "buffer_spill")
        self.payloads = PayloadStore(config.buffer.buffer_memory_bytes, Path(folder))
        self.replay = ReplayPool(config)
        self._records: dict[int, _Record] = {}
        self._ranked = RankedGroups()  # the generated groups, when the filter is a Ranking
        self._by_oldest = RankedGroups()  # the generated groups that a model sampled, oldest token first
        self._by_newest = RankedGroups()  # the same by their newest token
        self._num_tokens: dict[int, int] = {}  # of the loss, of generated groups
        self._per_group, self._first_index = config.train.n_samples_per_prompt, 0  # numbers samples, see `_group`
        self._promised: dict[int, list[int]] = {}  # step -> groups that it had taken when the state was saved

    def reserve(self, num_groups: int) -> list[Group]:
        if num_groups < 0:
            raise ValueError(f"cannot reserve {num_groups} groups")
        num_new = max(0, num_groups - self.ledger.count(State.WAITING))
        reserved = [self.ledger.reserve() for _ in range(num_groups - num_new)]
        waiting = [group_index for group_index in reserved if group_index is not None]
        try:  # when a spilled group cannot be read, or the source fails, no group has changed its state
            groups = self._waiting_groups(waiting)
            new = self._new_groups(num_new) if num_new else []
        except BaseException:
            for group_index in waiting:
                self.ledger.requeue(group_index)
            raise
        for group in new:
            opened = self.ledger.open()
            assert opened == group.group_index
            self._records[opened] = _Record(group.source_index, group.epoch, 0)
        return groups + new

    def admit(self, group: Group) -> None:
        if not group.samples:
            raise ValueError(f"group {group.group_index} has no samples, so it cannot train")
        nbytes, summary = check_and_weigh(group), summarise(group)
        self.ledger.check_generate(group.group_index)
        self._enter(group, summary)  # first, as it asks the user's code for a rank
        self.ledger.generate(group.group_index)
        self._count_attempts(group)
        self.payloads.put(group, nbytes)

    def requeue(self, group: Group) -> None:
        has_tokens = any(sample.response_length for sample in group.samples)
        nbytes = check_and_weigh(group) if has_tokens else 0
        self.ledger.requeue(group.group_index)
        self._count_attempts(group)
        if has_tokens:
            self.payloads.put(group, nbytes)
        else:
            self.payloads.remove(group.group_index)

    def drop(self, group: Group, reason: str) -> None:
        self.ledger.drop(group.group_index, reason)
        self._leave(group.group_index)
        self._release(group.group_index)

    def expire(self, min_version: int, action: Literal["drop", "requeue", "mask"]) -> tuple[int, int]:
        expired = (self._by_newest if action == "mask" else self._by_oldest).pop_below(min_version)
        most, num_tokens = self.config.asynchrony.max_group_attempts, 0
        for group_index in expired:
            num_tokens += self._num_tokens[group_index]
            if action == "drop" or self._records[group_index].attempts >= most:
                self.ledger.drop(group_index, "stale")
                self._release(group_index)
            else:
                self.ledger.send_back(group_index, "stale")
                self.payloads.remove(group_index)
            self._leave(group_index)
        return len(expired), num_tokens

    def take(self, step: int, num_groups: int) -> list[Group]:
        if num_groups < 0:
            raise ValueError(f"step {step} cannot take {num_groups} groups")
        taken = self.ledger.admitted.get(step)
        if taken is not None:
            again = self.replay.of_step.get(step, [])
            have = len(taken) + len(again)
            if have != num_groups:
                raise ValueError(f"step {step} has taken {have} groups before, now {num_groups} are asked for")
            return self.payloads.get_many(taken) + self._replayed(again)
        num_replayed = min(self.replay.available(step), max(num_groups - 1, 0))
        # Read before the account changes: a spilled group may be gone.
        groups = self._choose(step, num_groups - num_replayed)
        replayed = self._replayed(self.replay.eligible(step)[:num_replayed])
        self.ledger.admit(step, [group.group_index for group in groups])
        self._promised.pop(step, None)
        for group in groups:
            self._leave(group.group_index)
        self.replay.choose(step, num_replayed)
        return groups + replayed

    def commit(self, step: int) -> None:
        keeps = self.replay.per_step > 0
        fresh = [summarise(g) for g in self.payloads.get_many(self.ledger.admitted.get(step, []))] if keeps else []
        committed = self.ledger.commit(step)
        forgotten = self.replay.trained(step, fresh) if keeps else committed
        for group_index in committed:
            self._records.pop(group_index, None)
        for group_index in forgotten:
            self.payloads.remove(group_index)

    def counts(self) -> dict[str, int]:
        counts = self.ledger.counts()
        if self.replay.per_step:
            counts["replayed"] = self.replay.num_replayed
        if isinstance(self.source, CountsSkippedRows):
            counts |= {f"skipped_rows/{reason}": n for reason, n in self.source.skipped_rows().items() if n}
        return counts

    def offload(self) -> None:
        self.payloads.offload()

    def onload(self) -> None:
        self.payloads.onload()

    def close(self) -> None:
        """Remove spilled files; a checkpoint does not need them."""
        self.payloads.close()

    def __len__(self) -> int:
        """Groups that the next step can have, replayed ones among them."""
        last = -1 if self.ledger.last_committed_step is None else self.ledger.last_committed_step
        next_step = max([last, *self.ledger.admitted]) + 1
        return self.ledger.count(State.GENERATED) + self.replay.available(next_step)

    def get(self, group_index: int) -> Group:
        """A live group with tokens, wherever it is, for inspection."""
        if group_index not in self.payloads:
            raise ValueError(f"group {group_index} has no tokens here: it is {self.ledger.state_of(group_index)}")
        return self.payloads.get_many([group_index])[0]

    def state_dict(self) -> dict[str, Any]:
        """JSON values and tensors, complete: it needs no file of the run that made it."""
        indices = sorted(self._records)
        records = [(i, *self._records[i]) for i in indices]
        promised = self._promised | self.ledger.admitted
        return {
            "format": FORMAT,
            "ledger": self.ledger.state_dict(),
            "samples": {"per_group": self._per_group, "first_index": self._first_index},
            "source": encode(self.source.state_dict(), "state of --data-source-path"),
            "records": torch.tensor(records, dtype=torch.int64).reshape(-1, 4),
            "replay": self.replay.state_dict(),
            "policies": {flag: encode(_state_of(flag, policy), flag) for flag, policy in self.policies.items()},
            "promised": [[step, list(groups)] for step, groups in sorted(promised.items())],
            "payloads": [packed.to_flat() for packed in self.payloads.packed()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError(f"--load: the buffer's state must be a dictionary, got {type(state).__name__}")
        if state.get("format") == "dumped":
            raise ValueError(
                "--load: this checkpoint was made with --load-rollouts; continue it with --load-rollouts, its prompts "
                "are not part of it"
            )
        if state.get("format") != FORMAT:
            raise ValueError(f"--load: buffer state of format {state.get('format')}, this version reads {FORMAT}")
        ledger, replay = Ledger(), ReplayPool(self.config)
        with part_of_state("ledger"):
            ledger.load_state_dict(state["ledger"])
        with part_of_state("records"):
            records = {group: _Record(*record) for group, record in read_records(state, ledger).items()}
        with part_of_state("samples"):
            first_index = read_numbering(state, ledger, self._per_group)
        with part_of_state("promised"):
            promised = read_promised(state, ledger)
        with part_of_state("replay"):
            replay.load_state_dict(state["replay"])
        with part_of_state("payloads"):
            blocks = read_payloads(state, ledger, replay.groups())
        with part_of_state("source"):
            self.source.load_state_dict(decode(state["source"]))  # refuses another dataset before anything changes
        with part_of_state("policies"):
            for flag, saved in state["policies"].items():
                if flag not in self.policies:
                    log.warning(
                        "--load: the state of %s is not used: this run has another one, which begins anew", flag
                    )
                    continue
                with own_code(flag, ", given a saved state"):
                    self.policies[flag].load_state_dict(decode(saved))
        self.ledger, self.replay, self._records, self._promised = ledger, replay, records, promised
        self._first_index = first_index
        self._ranked, self._by_oldest, self._by_newest = RankedGroups(), RankedGroups(), RankedGroups()
        self._num_tokens = {}
        self.payloads.load(blocks)
        for group_index in self.replay.dismissed():
            self._release(group_index)
        generated = self.ledger.in_state(State.GENERATED)
        with part_of_state("payloads"):
            for at in range(0, len(generated), 256):
                for group in self.payloads.get_many(generated[at : at + 256]):
                    self._enter(group, summarise(group))

    def _new_groups(self, count: int) -> list[Group]:
        """The source's next prompts as groups that are not in the ledger yet."""
        return [
            self._group(group_index, prompt, _Record(prompt.source_index, epoch, 0))
            for group_index, (epoch, prompt) in enumerate(self.source.next_prompts(count), self.ledger.next_group_index)
        ]

    def _group(self, group_index: int, prompt: Prompt, record: _Record) -> Group:
        """A group with nothing generated. `first_index` moves at a resume with another --n-samples-per-prompt, beyond
        every index that was given before it."""
        n, first = self._per_group, self._first_index + group_index * self._per_group
        samples = [
            Sample(
                index=first + i,
                group_index=group_index,
                rollout_id=first + i,
                prompt=copy.deepcopy(prompt.prompt),
                label=copy.deepcopy(prompt.label),
                metadata=copy.deepcopy(prompt.metadata),
            )
            for i in range(n)
        ]
        return Group(group_index=group_index, samples=samples, **record._asdict())

    def _waiting_groups(self, group_indices: list[int]) -> list[Group]:
        """Requeued groups to go on with. One with tokens is a copy: until it comes back, the old state is saved."""
        with_tokens = [group_index for group_index in group_indices if group_index in self.payloads]
        begun = {group.group_index: copy.deepcopy(group) for group in self.payloads.get_many(with_tokens)}
        return [begun.get(group_index) or self._begin_anew(group_index) for group_index in group_indices]

    def _begin_anew(self, group_index: int) -> Group:
        record = self._records[group_index]
        return self._group(group_index, self.source.get(record.source_index), record)

    def _count_attempts(self, group: Group) -> None:
        self._records[group.group_index] = self._records[group.group_index]._replace(attempts=group.attempts)

    def _enter(self, group: Group, summary: GroupSummary) -> None:
        """The group is one of those that may be taken. The key of a Ranking may be the user's own."""
        if isinstance(self.filter, Ranking):
            try:
                rank = self.filter.key(summary)
                _check_rank(rank)
                self._ranked.add(summary.group_index, rank)  # compares it with others
            except Exception as error:  # code of the user may raise anything
                flag = f"--buffer-filter-path {self.config.buffer.buffer_filter_path}"
                where = f"for group {summary.group_index}"
                raise ValueError(f"{flag}: its key raised {type(error).__name__}: {error}, {where}") from error
        self._num_tokens[group.group_index] = group.num_trained_tokens
        newest = group.newest_version
        if newest is not None:
            self._by_oldest.add(group.group_index, summary.oldest_version)
            self._by_newest.add(group.group_index, newest)

    def _leave(self, group_index: int) -> None:
        """The group is no longer one of those that may be taken."""
        self._ranked.discard(group_index)
        self._by_oldest.discard(group_index)
        self._by_newest.discard(group_index)
        self._num_tokens.pop(group_index, None)
        if self._promised:  # after a resume only
            self._promised = {step: groups for step, groups in self._promised.items() if group_index not in groups}

    def _release(self, group_index: int) -> None:
        self.payloads.remove(group_index)
        self._records.pop(group_index, None)

    def _choose(self, step: int, num_groups: int) -> list[Group]:
        have = self.ledger.count(State.GENERATED)
        if have < num_groups:
            counts = self.counts()
            raise ValueError(f"step {step} asks for {num_groups} groups, but only {have} are generated: {counts}")
        promised = self._promised.get(step, [])
        if promised and len(promised) == num_groups:
            return self._objects(promised)
        spoken_for = {i for other, groups in self._promised.items() if other != step for i in groups}
        if have - len(spoken_for) < num_groups:
            self._promised.clear()
            spoken_for.clear()
        if isinstance(self.filter, Ranking):
            return self._objects(self._ranked.first(num_groups, spoken_for))
        candidates = [i for i in self.ledger.in_state(State.GENERATED) if i not in spoken_for]
        return self._apply_filter(step, candidates, num_groups)

    def _replayed(self, group_indices: list[int]) -> list[Group]:
        groups = self.payloads.get_many(group_indices)
        return [replace(group, replays=self.replay.uses(group.group_index) + 1) for group in groups]

    def _apply_filter(self, step: int, candidates: list[int], num_groups: int) -> list[Group]:
        """Let a custom policy choose. It sees every candidate with its tokens, spilled ones read from disk."""
        flag = f"--buffer-filter-path {self.config.buffer.buffer_filter_path}"
        groups = self.payloads.get_many(candidates)
        indices = judge_groups(
            flag, f", for step {step}", groups, lambda copies: self.filter(self.config, step, copies, num_groups)
        )
        if len(indices) != num_groups or len(set(indices)) < len(indices):
            what = "a group twice" if len(set(indices)) < len(indices) else f"{len(indices)} groups"
            raise ValueError(f"{flag} returned {what} for step {step}, which trains on {num_groups} different ones")
        return self._objects(indices)

    def _objects(self, group_indices: list[int]) -> list[Group]:
        return self.payloads.get_many(group_indices)


def _state_of(flag: str, policy: Stateful) -> dict[str, Any]:
    with own_code(flag, ", asked for its state"):
        return policy.state_dict()


def _check_rank(rank: Any) -> None:
    """Raise unless it has a place in an order: NaN has none, and what is compared to several values."""
    for part in rank if isinstance(rank, tuple) else (rank,):
        bool(part < part)
        if part != part:
            raise ValueError(f"{rank!r:.60} has no place in an order")
