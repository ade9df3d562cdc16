from __future__ import annotations

import pytest

from slime_rl.buffer.conformance import check_buffer, main
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.types import Group


def test_the_ledger_buffer_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger"]) == 0
    assert capsys.readouterr().out.endswith("11 of 11 behaviours\n")


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


def test_a_class_without_a_method_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"--buffer-path: '.*:NoBuffer' has no method reserve\(self, num_groups"):
        check_buffer(f"{__name__}:NoBuffer")


class NoBuffer:
    pass
