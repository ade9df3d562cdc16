from __future__ import annotations

import threading
from typing import Any, Literal

import pytest

from slime_rl.buffer import conformance
from slime_rl.buffer.conformance import check_buffer, main
from slime_rl.buffer.ledger import State
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.types import Group


def test_the_ledger_buffer_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger"]) == 0
    assert capsys.readouterr().out.endswith("17 of 17 behaviours\n")


class Forgetful(LedgerBuffer):
    """Loses interrupted groups."""

    def requeue(self, group: Group) -> None:
        self.drop(group, "interrupted")


def test_a_buffer_that_loses_groups_fails_and_the_behaviour_is_named() -> None:
    failed = {name for name, problem in check_buffer(f"{__name__}:Forgetful").items() if problem}
    assert {
        "requeued_groups_come_first_and_keep_their_tokens",
        "trains_each_prompt_once_through_random_kills",
    } <= failed
    assert "takes_what_was_admitted_unchanged" not in failed


class TakesAnew(LedgerBuffer):
    """A step that is asked for again gets other groups."""

    def take(self, step: int, num_groups: int) -> list[Group]:
        for group_index in self.ledger.admitted.pop(step, []):
            self.ledger._set(group_index, State.DROPPED)
        return super().take(step, num_groups)


class TakesForEver(LedgerBuffer):
    """Does not know which steps have been committed."""

    def take(self, step: int, num_groups: int) -> list[Group]:
        self.ledger.last_committed_step = None
        return super().take(step, num_groups)


class LosesReserved(LedgerBuffer):
    """What was being generated is gone after a resume."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for group in super().reserve(self.ledger.count(State.WAITING)):
            self.ledger.drop(group.group_index, "lost")


class ForgetsTheCursor(LedgerBuffer):
    """Begins with the first prompt again."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "source": {"position": 0}}


class DropsInSilence(LedgerBuffer):
    """Counts every drop under one reason."""

    def drop(self, group: Group, reason: str) -> None:
        super().drop(group, "dropped")


class CountsTaken(LedgerBuffer):
    """Says that groups wait which a step has taken."""

    def __len__(self) -> int:
        return super().__len__() + self.ledger.count(State.ADMITTED)


class NewFirst(LedgerBuffer):
    """Requeued groups wait behind new ones."""

    def reserve(self, num_groups: int) -> list[Group]:
        return super().reserve(num_groups)[::-1]


class LosesTokens(LedgerBuffer):
    """An interrupted group begins anew."""

    def requeue(self, group: Group) -> None:
        for sample in group.samples:
            sample.clear_response()
        super().requeue(group)


class ForgetsOffloaded(LedgerBuffer):
    """Offloads into nothing."""

    def offload(self) -> None:
        for group in self.payloads.get_many(self.ledger.in_state(State.GENERATED)):
            for sample in group.samples:
                sample.clear_response()


class NumbersAnew(LedgerBuffer):
    """Sample indices begin at 0 in every process."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._first_index = -self.ledger.next_group_index * self._per_group


class KeepsItsAge(LedgerBuffer):
    """Never lets go of a group."""

    def expire(self, min_version: int, action: Literal["drop", "requeue", "mask"]) -> tuple[int, int]:
        return 0, 0


class AddsToWhatIsThere(LedgerBuffer):
    """Goes back to a checkpoint, but keeps the counts of what came after it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.ledger.drop_reasons
        super().load_state_dict(state)
        self.ledger.drop_reasons.update(before)


class ReleasesWhenSaved(LedgerBuffer):
    """Saving gives back what a step had taken."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for groups in self.ledger.admitted.values():
            for group_index in groups:
                self.ledger._set(group_index, State.GENERATED)
        self.ledger.admitted.clear()
        return state


class HalfTakes(LedgerBuffer):
    """Gives what there is where a step wants more."""

    def take(self, step: int, num_groups: int) -> list[Group]:
        return super().take(step, min(num_groups, max(len(self), len(self.ledger.admitted.get(step, [])))))


class AdmitsTwice(LedgerBuffer):
    """Takes a group that it has."""

    def admit(self, group: Group) -> None:
        if self.ledger.state_of(group.group_index) is not State.GENERATED:
            super().admit(group)


class OffloadsWaiting(LedgerBuffer):
    """Interrupted groups are gone after an offload."""

    def offload(self) -> None:
        super().offload()
        for group_index in self.ledger.in_state(State.WAITING):
            self.payloads.remove(group_index)


class LosesRewardInfo(LedgerBuffer):
    """Gives groups without the details of their rewards."""

    def take(self, step: int, num_groups: int) -> list[Group]:
        groups = super().take(step, num_groups)
        for sample in (sample for group in groups for sample in group.samples):
            sample.reward_info = {}
        return groups


class LosesLeftOut(LedgerBuffer):
    """Does not keep which samples were left out."""

    def admit(self, group: Group) -> None:
        group.left_out = {}
        super().admit(group)


class SharesMetadata(LedgerBuffer):
    """The samples of a group have one metadata object."""

    def reserve(self, num_groups: int) -> list[Group]:
        groups = super().reserve(num_groups)
        for sample in (sample for group in groups for sample in group.samples[1:]):
            sample.metadata = next(g.samples[0].metadata for g in groups if g.group_index == sample.group_index)
        return groups


class ForgetsWhyRequeued(LedgerBuffer):
    """Counters of requeued groups begin at 0 after a resume."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.ledger.requeue_reasons.clear()


class ForgetsWhatWasTaken(LedgerBuffer):
    """After a resume a step may get other groups than before."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "promised": []}


class GivesItsOwnList(LedgerBuffer):
    """The saved state goes on changing."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        live = self.__dict__.setdefault("_list", [])
        live[:] = state["ledger"]["live"]["generated"]
        state["ledger"]["live"]["generated"] = live
        return state


class Exits(LedgerBuffer):
    """Ends the process."""

    def reserve(self, num_groups: int) -> list[Group]:
        raise SystemExit(3)


WRONG = [
    (OffloadsWaiting, "comes_back_from_offload_unchanged"),
    (LosesRewardInfo, "takes_what_was_admitted_unchanged"),
    (LosesLeftOut, "takes_what_was_admitted_unchanged"),
    (SharesMetadata, "gives_each_sample_objects_of_its_own"),
    (ForgetsWhyRequeued, "keeps_tokens_counters_and_promises_through_resumes"),
    (ForgetsWhatWasTaken, "keeps_tokens_counters_and_promises_through_resumes"),
    (GivesItsOwnList, "saved_states_do_not_change_later"),
    (TakesAnew, "gives_the_same_groups_for_the_same_step"),
    (TakesForEver, "refuses_ways_that_are_not_in_the_ledger"),
    (LosesReserved, "resumes_with_every_group_accounted_for"),
    (ForgetsTheCursor, "trains_each_prompt_once_through_random_kills"),
    (DropsInSilence, "counts_drops_by_reason_and_forgets_the_group"),
    (CountsTaken, "keeps_the_surplus_for_later"),
    (NewFirst, "requeued_groups_come_first_and_keep_their_tokens"),
    (LosesTokens, "requeued_groups_come_first_and_keep_their_tokens"),
    (ForgetsOffloaded, "comes_back_from_offload_unchanged"),
    (NumbersAnew, "numbers_groups_and_samples_uniquely_through_resumes"),
    (KeepsItsAge, "lets_go_of_groups_that_are_too_old"),
    (AddsToWhatIsThere, "goes_back_to_a_saved_state_in_place"),
    (ReleasesWhenSaved, "saves_without_changing_anything"),
    (HalfTakes, "keeps_the_surplus_for_later"),
    (AdmitsTwice, "refuses_ways_that_are_not_in_the_ledger"),
]


@pytest.mark.parametrize(("buffer", "behaviour"), WRONG, ids=[buffer.__name__ for buffer, _ in WRONG])
def test_a_wrong_buffer_fails_at_the_behaviour_that_it_lacks(buffer: type[LedgerBuffer], behaviour: str) -> None:
    problem = check_buffer(f"{__name__}:{buffer.__name__}")[behaviour]
    assert problem is not None and ("ContractError" in problem or "ValueError" in problem), problem


def test_a_buffer_that_ends_the_process_fails_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{__name__}:Exits"]) == 1
    out = capsys.readouterr().out
    assert "SystemExit: 3" in out
    assert out.endswith("0 of 17 behaviours\n")


def test_a_class_without_a_method_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"--buffer-path: '.*:NoBuffer' has no method reserve\(self, num_groups"):
        check_buffer(f"{__name__}:NoBuffer")


class NoBuffer:
    pass


class HangsAtOffload(LedgerBuffer):
    def offload(self) -> None:
        threading.Event().wait()


def test_a_behaviour_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "CHECK_TIMEOUT_S", 5.0)
    monkeypatch.setattr(conformance, "CHECKS", [conformance.comes_back_from_offload_unchanged])
    assert check_buffer(f"{__name__}:HangsAtOffload") == {"comes_back_from_offload_unchanged": "no end after 5 s"}
