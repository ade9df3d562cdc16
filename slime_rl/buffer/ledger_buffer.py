"""`--buffer-path ledger`: the data buffer. A ledger says where each group stands, a store holds what groups carry.

    source ──next_prompts──► reserve ──► (rollout) ──► admit ──► take(step) ──► (training) ──► commit(step)
                                ▲            │ requeue / drop      ▲
                                └────────────┘                     └── --buffer-filter-path chooses

Saved state is taken between calls: what was reserved waits again after a resume, what a step had taken is taken by that
step again.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from slime_rl.buffer.filters import GroupSummary, Ranking, summarise
from slime_rl.buffer.ledger import Ledger, State
from slime_rl.buffer.packed import PackedGroups
from slime_rl.buffer.payloads import PayloadStore
from slime_rl.buffer.policies import BUFFER_FILTERS, stateful_policies
from slime_rl.buffer.ranked import RankedGroups
from slime_rl.buffer.replay import ReplayPool
from slime_rl.config import Config
from slime_rl.data.codec import decode, encode
from slime_rl.protocols import BufferFilter, CountsSkippedRows, PromptSource
from slime_rl.registry import own_code
from slime_rl.types import Group, Prompt, Sample

FORMAT = 2


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
        self._by_version = RankedGroups()  # the generated groups that a model sampled, oldest token first
        self._promised: dict[int, list[int]] = {}  # step -> groups that it had taken when the state was saved

    def reserve(self, num_groups: int) -> list[Group]:
        if num_groups < 0:
            raise ValueError(f"cannot reserve {num_groups} groups")
        num_new = max(0, num_groups - self.ledger.count(State.WAITING))
        # Drawn first: when the source fails, no group has changed its state.
        prompts = self.source.next_prompts(num_new) if num_new else []
        if len(prompts) != num_new:
            raise ValueError(f"--data-source-path gave {len(prompts)} prompts where {num_new} were asked for")
        groups: list[Group] = []
        while len(groups) < num_groups - num_new:
            group_index = self.ledger.reserve()
            assert group_index is not None
            groups.append(self._waiting_group(group_index))
        for epoch, prompt in prompts:
            group_index = self.ledger.open()
            self._records[group_index] = _Record(prompt.source_index, epoch, 0)
            groups.append(self._new_group(group_index, prompt))
        return groups

    def admit(self, group: Group) -> None:
        if not group.samples:
            raise ValueError(f"group {group.group_index} has no samples, so it cannot train")
        self.ledger.generate(group.group_index)
        self._count_attempts(group)
        self._enter(summarise(group))
        self.payloads.put(group)

    def requeue(self, group: Group) -> None:
        self.ledger.requeue(group.group_index)
        self._count_attempts(group)
        if any(sample.response_length for sample in group.samples):
            self.payloads.put(group)
        else:
            self.payloads.remove(group.group_index)

    def drop(self, group: Group, reason: str) -> None:
        self.ledger.drop(group.group_index, reason)
        self._leave(group.group_index)
        self._release(group.group_index)

    def expire(self, min_version: int, action: Literal["drop", "requeue"]) -> int:
        expired = self._by_version.pop_below(min_version)
        most = self.config.asynchrony.max_group_attempts
        for group_index in expired:
            if action == "drop" or self._records[group_index].attempts >= most:
                self.ledger.drop(group_index, "stale")
                self._release(group_index)
            else:
                self.ledger.send_back(group_index, "stale")
                self.payloads.remove(group_index)
            self._leave(group_index)
        return len(expired)

    def take(self, step: int, num_groups: int) -> list[Group]:
        taken = self.ledger.admitted.get(step)
        if taken is not None:
            have = len(taken) + len(self.replay.of_step.get(step, []))
            if have != num_groups:
                raise ValueError(f"step {step} has taken {have} groups before, now {num_groups} are asked for")
            return self.payloads.get_many(taken) + self._replayed(step)
        groups = self._choose(step, num_groups - min(self.replay.available(step), max(num_groups - 1, 0)))
        self.ledger.admit(step, [group.group_index for group in groups])
        self._promised.pop(step, None)
        for group in groups:
            self._leave(group.group_index)
        self.replay.choose(step, num_groups - len(groups))
        return groups + self._replayed(step)

    def commit(self, step: int) -> None:
        committed = self.ledger.commit(step)
        if self.replay.per_step == 0:
            forgotten = committed
        else:
            forgotten = self.replay.trained(step, [summarise(group) for group in self.payloads.get_many(committed)])
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
        records = [self._records[i] for i in indices]
        promised = self._promised | self.ledger.admitted
        return {
            "format": FORMAT,
            "ledger": self.ledger.state_dict(),
            "source": encode(self.source.state_dict(), "state of --data-source-path"),
            "records": torch.tensor([(i, *record) for i, record in zip(indices, records, strict=True)]).reshape(-1, 4),
            "replay": self.replay.state_dict(),
            "policies": {flag: encode(policy.state_dict(), flag) for flag, policy in self.policies.items()},
            "promised": [[step, list(groups)] for step, groups in sorted(promised.items())],
            "payloads": [packed.to_flat() for packed in self.payloads.packed()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("format") == "dumped":
            raise ValueError(
                "--load: this checkpoint was made with --load-rollouts; continue it with --load-rollouts, its prompts "
                "are not part of it"
            )
        if state.get("format") != FORMAT:
            raise ValueError(f"--load: buffer state of format {state.get('format')}, this version reads {FORMAT}")
        self.source.load_state_dict(decode(state["source"]))  # refuses another dataset before anything changes
        self.ledger.load_state_dict(state["ledger"])
        self._records = {group_index: _Record(*record) for group_index, *record in state["records"].tolist()}
        self._promised = {int(step): list(groups) for step, groups in state["promised"]}
        self.replay.load_state_dict(state["replay"])
        for flag in self.policies.keys() & state.get("policies", {}).keys():  # one that is new begins anew
            self.policies[flag].load_state_dict(decode(state["policies"][flag]))
        self.payloads.load([PackedGroups.from_flat(flat) for flat in state["payloads"]])
        self._ranked, self._by_version = RankedGroups(), RankedGroups()
        generated = self.ledger.in_state(State.GENERATED)
        for at in range(0, len(generated), 256):
            for group in self.payloads.get_many(generated[at : at + 256]):
                self._enter(summarise(group))

    def _new_group(self, group_index: int, prompt: Prompt) -> Group:
        n, record = self.config.train.n_samples_per_prompt, self._records[group_index]
        samples = [
            Sample(
                index=group_index * n + i,
                group_index=group_index,
                rollout_id=group_index * n + i,
                prompt=copy.deepcopy(prompt.prompt),
                label=prompt.label,
                metadata=copy.deepcopy(prompt.metadata),
            )
            for i in range(n)
        ]
        return Group(group_index=group_index, samples=samples, **record._asdict())

    def _waiting_group(self, group_index: int) -> Group:
        """A requeued group to go on with. One with tokens is a copy: until it comes back, the old state is saved."""
        if group_index in self.payloads:
            return copy.deepcopy(self.payloads.get_many([group_index])[0])
        return self._new_group(group_index, self.source.get(self._records[group_index].source_index))

    def _count_attempts(self, group: Group) -> None:
        self._records[group.group_index] = self._records[group.group_index]._replace(attempts=group.attempts)

    def _enter(self, summary: GroupSummary) -> None:
        if isinstance(self.filter, Ranking):
            self._ranked.add(summary.group_index, self.filter.key(summary))
        if summary.oldest_version >= 0:
            self._by_version.add(summary.group_index, summary.oldest_version)

    def _leave(self, group_index: int) -> None:
        """The group is no longer one of those that may be taken."""
        self._ranked.discard(group_index)
        self._by_version.discard(group_index)
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
        spoken_for = {i for groups in self._promised.values() for i in groups}
        if have - len(spoken_for) < num_groups:
            self._promised.clear()
            spoken_for.clear()
        if isinstance(self.filter, Ranking):
            return self._objects(self._ranked.first(num_groups, spoken_for))
        candidates = [i for i in self.ledger.in_state(State.GENERATED) if i not in spoken_for]
        return self._apply_filter(step, candidates, num_groups)

    def _replayed(self, step: int) -> list[Group]:
        groups = self.payloads.get_many(self.replay.of_step.get(step, []))
        return [replace(group, replays=self.replay.uses(group.group_index) + 1) for group in groups]

    def _apply_filter(self, step: int, candidates: list[int], num_groups: int) -> list[Group]:
        """Let a custom policy choose. It sees every candidate with its tokens, spilled ones read from disk."""
        flag = f"--buffer-filter-path {self.config.buffer.buffer_filter_path}"
        with own_code(flag, f", for step {step}"):
            chosen = self.filter(self.config, step, self.payloads.get_many(candidates), num_groups)
        if not isinstance(chosen, list) or not all(isinstance(group, Group) for group in chosen):
            raise ValueError(f"{flag} must return a list of groups, got {type(chosen).__name__}")
        indices = [group.group_index for group in chosen]
        if foreign := sorted(set(indices) - set(candidates)):
            raise ValueError(f"{flag} returned groups that it was not given: {foreign[:10]}")
        if len(indices) != num_groups or len(set(indices)) < len(indices):
            what = "a group twice" if len(set(indices)) < len(indices) else f"{len(indices)} groups"
            raise ValueError(f"{flag} returned {what} for step {step}, which trains on {num_groups} different ones")
        return self._objects(indices)

    def _objects(self, group_indices: list[int]) -> list[Group]:
        return self.payloads.get_many(group_indices)
