"""Does a buffer keep the contract of `protocols.DataBuffer`? Run any implementation through it:

    python -m slime_rl.buffer.conformance my_package.my_module:MyBuffer

Prints one line per behaviour and ends with exit code 1 when one is missing, or takes over two minutes. `check_buffer`
does the same for tests.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from slime_rl.buffer.contract_scene import (
    GROUP_SIZE,
    NUM_PROMPTS,
    CountingSource,
    MakeBuffer,
    dress,
    expect,
    fill,
    indices,
    refuses,
    through_disk,
)
from slime_rl.buffer.policies import BUFFERS
from slime_rl.config import Config, parse_config
from slime_rl.protocols import DataBuffer
from slime_rl.types import Group

CHECK_TIMEOUT_S = 120.0


def reserves_new_groups_with_stable_numbers(make: MakeBuffer) -> None:
    buffer = make()
    groups = buffer.reserve(3) + buffer.reserve(2)
    expect(len(groups) == 5 == len(set(indices(groups))), "reserve gives as many different groups as asked", groups)
    expect(indices(groups) == sorted(indices(groups)), "new groups have rising group_index", indices(groups))
    expect(all(len(g.samples) == GROUP_SIZE for g in groups), "a group has --n-samples-per-prompt samples", groups)
    prompts = [g.samples[0].prompt for g in groups]
    expect(prompts == [f"prompt {i}" for i in range(5)], "groups carry the source's prompts in order", prompts)
    samples = [s.index for g in groups for s in g.samples]
    expect(len(set(samples)) == len(samples), "sample indices are unique", samples)
    expect(buffer.counts().get("reserved") == 5, "counts() has 5 under 'reserved'", buffer.counts())


def gives_each_sample_objects_of_its_own(make: MakeBuffer) -> None:
    """A generate function may write into its sample; others, those of the next epoch too, must not see it."""
    buffer = make()
    groups = buffer.reserve(NUM_PROMPTS + 1)
    samples = [*groups[0].samples, *groups[-1].samples]  # of the same prompt in two epochs
    for number, sample in enumerate(samples):
        sample.metadata[str(number)] = sample.reward_info[str(number)] = number
        sample.tokens.append(number)
        sample.label.append(number)
    seen = [(len(s.metadata), len(s.reward_info), len(s.tokens), len(s.label)) for s in samples]
    expect(set(seen) == {(1, 1, 1, 2)}, "no two samples share metadata, reward_info, tokens or label", seen)


def takes_what_was_admitted_unchanged(make: MakeBuffer) -> None:
    buffer = make()
    groups = [dress(fill(group)) for group in buffer.reserve(4)]
    expected = json.dumps([repr(group) for group in groups])
    for group in groups:
        buffer.admit(group)
    expect(len(buffer) == 4, "len() counts generated groups", len(buffer))
    taken = sorted(buffer.take(0, 4), key=lambda group: group.group_index)
    expect(json.dumps([repr(g) for g in taken]) == expected, "take returns groups as they were admitted", taken)


def keeps_the_surplus_for_later(make: MakeBuffer) -> None:
    buffer = make()
    for group in buffer.reserve(7):
        buffer.admit(fill(group))
    seen = [set(indices(buffer.take(step, 3))) for step in range(2)]
    expect(not seen[0] & seen[1], "a group trains in one step only", seen)
    expect(len(buffer) == 1, "7 groups, 2 steps of 3: one is left", len(buffer))
    refuses(lambda: buffer.take(2, 3), "take(2, 3) with one generated group")
    expect(len(buffer) == 1, "a refused take changes nothing", len(buffer))


def gives_the_same_groups_for_the_same_step(make: MakeBuffer) -> None:
    buffer = make()
    for group in buffer.reserve(5):
        buffer.admit(fill(group))
    first = buffer.take(0, 2)
    for group in buffer.reserve(2):
        buffer.admit(fill(group))
    expect(indices(buffer.take(0, 2)) == indices(first), "take(0, 2) again returns the same groups", first)


def requeued_groups_come_first_and_keep_their_tokens(make: MakeBuffer) -> None:
    buffer = make()
    groups = buffer.reserve(4)
    partial = fill(groups[2], num_tokens=1)
    tokens = [list(sample.tokens) for sample in partial.samples]
    groups[3].samples *= 2  # as a generate function may
    for group in (groups[3], partial, groups[0]):
        buffer.requeue(group)
    expect(buffer.counts().get("waiting") == 3, "counts() has 3 under 'waiting'", buffer.counts())
    again = buffer.reserve(4)
    wanted = [groups[i].group_index for i in (0, 2, 3)]
    expect(indices(again)[:3] == wanted, f"requeued groups come first, lowest index first: {wanted}", indices(again))
    expect(again[3].group_index not in indices(groups), "then a new one", indices(again))
    expect(len(again[2].samples) == GROUP_SIZE, "a group without tokens has its first samples", again[2])
    kept = [sample.tokens for sample in again[1].samples]
    expect(kept == tokens, "tokens of an interrupted group are kept", kept)


def counts_drops_by_reason_and_forgets_the_group(make: MakeBuffer) -> None:
    buffer = make()
    groups = buffer.reserve(3)
    buffer.drop(groups[0], "zero_std")
    buffer.drop(groups[2], "zero_std")
    expect(buffer.counts().get("dropped/zero_std") == 2, "counts() has 2 under 'dropped/zero_std'", buffer.counts())
    refuses(lambda: buffer.admit(fill(groups[0])), "admit a dropped group")
    expect(groups[0].group_index not in indices(buffer.reserve(9)), "a dropped group never comes back", groups[0])


def lets_go_of_groups_that_are_too_old(make: MakeBuffer) -> None:
    cases: list[tuple[Literal["drop", "requeue", "mask"], str, str]] = [
        ("drop", "dropped", "dropped/stale"),
        ("requeue", "waiting", "requeued/stale"),
        ("mask", "waiting", "requeued/stale"),
    ]
    for action, state, counter in cases:
        buffer = make()
        for number, group in enumerate(buffer.reserve(4)):
            fill(group)
            for sample in group.samples:
                old = sample.response_length if action == "mask" and number < 2 else 1
                sample.weight_versions[:old] = [0 if action == "mask" else number] * old
            group.attempts = 2
            buffer.admit(group)
        gone = buffer.expire(0, action), buffer.expire(2, action)
        expect(gone[0] == (0, 0), "nothing is older than version 0", gone[0])
        expect(gone[1] == (2, 15), "expire(2) lets go of groups 0 and 1 with 15 tokens", gone[1])
        counts = {name: buffer.counts().get(name) for name in (state, counter, "generated")}
        expect(counts == {state: 2, counter: 2, "generated": 2}, f"they are {state}, under {counter}", counts)
        expect(indices(buffer.take(0, 2)) == [2, 3], "the others train", buffer.counts())
        again = buffer.reserve(2)
        if action != "drop":
            expect(indices(again) == [0, 1], "requeued groups come first", again)
            expect(not any(s.response_length for g in again for s in g.samples), "without their old tokens", again)
            expect([group.attempts for group in again] == [2, 2], "their attempts still count", again)


def refuses_ways_that_are_not_in_the_ledger(make: MakeBuffer) -> None:
    buffer = make()
    group, another = (fill(group) for group in buffer.reserve(2))
    buffer.admit(group)
    refuses(lambda: buffer.admit(group), "admit a group twice")
    refuses(lambda: buffer.requeue(group), "requeue a generated group")
    refuses(lambda: buffer.commit(0), "commit a step that nothing was taken for")
    buffer.take(0, 1)
    buffer.commit(0)
    refuses(lambda: buffer.commit(0), "commit a step twice")
    buffer.admit(another)
    refuses(lambda: buffer.take(0, 1), "take a step that is committed")
    refuses(lambda: buffer.admit(group), "admit a committed group")
    refuses(lambda: buffer.drop(group, "late"), "drop a committed group")
    refuses(lambda: buffer.requeue(group), "requeue a committed group")
    stranger = Group(group_index=10_000, source_index=0, epoch=0, samples=group.samples)
    refuses(lambda: buffer.admit(stranger), "admit a group that was never reserved")
    expect(buffer.counts().get("committed") == 1, "counts() has 1 under 'committed'", buffer.counts())


def comes_back_from_offload_unchanged(make: MakeBuffer) -> None:
    buffer = make()
    groups = [dress(fill(group)) for group in buffer.reserve(3)]
    expected = [repr(group) for group in groups]
    for group in groups:
        buffer.admit(group)
    begun = buffer.reserve(2)
    tokens = [list(sample.tokens) for group in begun for sample in fill(group).samples]
    for group in begun:
        buffer.requeue(group)
    buffer.offload()
    expect([repr(g) for g in buffer.take(0, 3)] == expected, "take after offload returns the groups unchanged", groups)
    buffer.onload()
    expect([repr(g) for g in buffer.take(0, 3)] == expected, "take after onload returns the groups unchanged", groups)
    again = [sample.tokens for group in buffer.reserve(2) for sample in group.samples]
    expect(again == tokens, "interrupted groups keep their tokens through offload and onload", again)


def resumes_with_every_group_accounted_for(make: MakeBuffer) -> None:
    buffer = make()
    groups = buffer.reserve(8)
    for group in groups[:5]:
        buffer.admit(fill(group))
    buffer.requeue(groups[5])
    buffer.drop(groups[6], "bad")
    buffer.take(0, 2)
    buffer.commit(0)
    taken = buffer.take(1, 2)
    resumed = make()
    resumed.load_state_dict(through_disk(buffer.state_dict()))
    counts = {state: resumed.counts().get(state) for state in ("waiting", "reserved", "generated", "admitted")}
    wanted = {"waiting": 2, "reserved": 0, "generated": 3, "admitted": 0}
    expect(counts == wanted, f"reserved groups wait again, admitted ones are generated again: {wanted}", counts)
    expect(resumed.counts().get("dropped/bad") == 1, "drop counters survive", resumed.counts())
    expect([repr(g) for g in resumed.take(1, 2)] == [repr(g) for g in taken], "step 1 trains on the same groups", taken)
    expect(indices(resumed.reserve(3))[:2] == indices(groups)[5:8:2], "waiting groups come back first", groups)


def keeps_tokens_counters_and_promises_through_resumes(make: MakeBuffer) -> None:
    buffer = make()
    groups = buffer.reserve(6)
    for group in groups[:4]:
        buffer.admit(dress(fill(group)))
    expected = [repr(group) for group in groups[2:4]]
    begun = [list(sample.tokens) for sample in fill(groups[4]).samples]
    buffer.requeue(groups[4])
    buffer.expire(5, "requeue")  # all of them: their tokens are of version 4
    counters = buffer.counts()
    buffer = resumed_from(buffer, make)
    wanted, got = ({k: c.get(k) for k in counters if "/" in k} for c in (counters, buffer.counts()))
    expect(wanted == got, "counters by reason survive", got)
    again = {group.group_index: group for group in buffer.reserve(6)}
    tokens = [sample.tokens for sample in again[groups[4].group_index].samples]
    expect(tokens == begun, "an interrupted group keeps its tokens", tokens)
    for group in groups[2:4]:  # generated anew
        buffer.admit(dress(fill(again[group.group_index])))
    taken = buffer.take(0, 2)
    expect([repr(group) for group in taken] == expected, "groups that are generated anew are as before", taken)
    for group in groups[:2]:  # older ones that were slower
        buffer.admit(dress(fill(again[group.group_index])))
    for _ in range(2):  # a run may be killed again before the step is committed
        buffer = resumed_from(buffer, make)
    expect(indices(buffer.take(0, 2)) == indices(taken), "the step trains the same groups after two resumes", taken)


def saved_states_do_not_change_later(make: MakeBuffer) -> None:
    """A state may be written while the buffer goes on."""
    buffer = make()
    first = buffer.reserve(5)
    for group in first[:3]:
        buffer.admit(fill(group))
    buffer.take(0, 1)
    buffer.drop(first[3], "before")
    state = buffer.state_dict()
    expected = json.dumps(through_disk(state), default=repr)
    buffer.commit(0)
    buffer.requeue(first[4])
    for group in buffer.reserve(4):
        buffer.admit(fill(group))
    buffer.take(1, 3)
    buffer.drop(buffer.reserve(1)[0], "later")
    buffer.state_dict()
    expect(json.dumps(through_disk(state), default=repr) == expected, "a state that was given stays as it is", state)


def resumed_from(buffer: DataBuffer, make: MakeBuffer) -> DataBuffer:
    resumed = make()
    resumed.load_state_dict(through_disk(buffer.state_dict()))
    return resumed


def goes_back_to_a_saved_state_in_place(make: MakeBuffer) -> None:
    """What happens to the running buffer when trainers are lost and the run returns to its checkpoint."""
    buffer = make()
    groups = buffer.reserve(4)
    for group in groups[:3]:
        buffer.admit(fill(group))
    buffer.requeue(groups[3])
    saved = through_disk(buffer.state_dict())
    counts = buffer.counts()
    for _ in range(2):
        taken = buffer.take(0, 2)
        buffer.commit(0)
        buffer.drop(buffer.reserve(3)[0], "later")
        buffer.load_state_dict(copy.deepcopy(saved))
        expect(buffer.counts() == counts, f"nothing is left of what came after the state: {counts}", buffer.counts())
        expect(
            [repr(g) for g in buffer.take(0, 2)] == [repr(g) for g in taken], "the step trains the same groups", taken
        )
        buffer.load_state_dict(copy.deepcopy(saved))
        again = buffer.reserve(2)
        expect(indices(again) == [3, 4], "waiting groups first, then the next number", indices(again))
        buffer.load_state_dict(copy.deepcopy(saved))


def numbers_groups_and_samples_uniquely_through_resumes(make: MakeBuffer) -> None:
    buffer = make()
    seen: list[tuple[int, int]] = []
    for step in range(3):
        for group in buffer.reserve(3):
            buffer.admit(fill(group))
        seen += [(g.group_index, s.index) for g in buffer.take(step, 3) for s in g.samples]
        buffer.commit(step)
        resumed = make()
        resumed.load_state_dict(through_disk(buffer.state_dict()))
        buffer = resumed
    expect(len({group for group, _ in seen}) == 9, "no group_index is given twice", seen)
    expect(len({sample for _, sample in seen}) == len(seen), "no sample index is given twice", seen)
    expect(buffer.counts().get("committed") == 9, "committed groups are counted over resumes", buffer.counts())


def saves_without_changing_anything(make: MakeBuffer) -> None:
    buffer = make()
    for group in buffer.reserve(5):
        buffer.admit(fill(group))
    taken, counts = buffer.take(0, 2), buffer.counts()
    first, second = (json.dumps(through_disk(buffer.state_dict()), default=repr) for _ in range(2))
    expect(first == second, "state_dict() twice gives the same state", second)
    expect(buffer.counts() == counts, f"saving leaves the counts as they are: {counts}", buffer.counts())
    expect(indices(buffer.take(0, 2)) == indices(taken), "a step that was taken stays taken", indices(taken))
    buffer.commit(0)


def trains_each_prompt_once_through_random_kills(make: MakeBuffer) -> None:
    for seed in range(10):
        rng, buffer = random.Random(seed), make()
        saved, trained, trained_when_saved = through_disk(buffer.state_dict()), [], 0
        step, step_when_saved = 0, 0
        while step < 12:
            for group in buffer.reserve(rng.randint(0, 4)):
                if rng.random() < 0.3:
                    buffer.requeue(group)
                else:
                    buffer.admit(fill(group))
            if rng.random() < 0.2:
                buffer = make()
                buffer.load_state_dict(copy.deepcopy(saved))
                del trained[trained_when_saved:]
                step = step_when_saved
            elif len(buffer) >= 3:
                trained += [(g.group_index, g.epoch, g.source_index) for g in buffer.take(step, 3)]
                buffer.commit(step)
                step += 1
                if rng.random() < 0.5:
                    saved, trained_when_saved, step_when_saved = through_disk(buffer.state_dict()), len(trained), step
        expect(len(set(trained)) == len(trained), "no prompt of an epoch trains twice", sorted(trained))
        wrong = [t for t in trained if t[0] != t[1] * NUM_PROMPTS + t[2]]
        expect(not wrong, "a group keeps its prompt and epoch", wrong)
        while buffer.counts().get("waiting"):
            for group in buffer.reserve(buffer.counts()["waiting"]):
                buffer.admit(fill(group))
        rest = indices(buffer.take(step, len(buffer)))
        seen = sorted([t[0] for t in trained] + rest)
        expect(seen == list(range(len(seen))), "no prompt is lost", seen)


CHECKS = (
    reserves_new_groups_with_stable_numbers,
    gives_each_sample_objects_of_its_own,
    takes_what_was_admitted_unchanged,
    keeps_the_surplus_for_later,
    gives_the_same_groups_for_the_same_step,
    requeued_groups_come_first_and_keep_their_tokens,
    counts_drops_by_reason_and_forgets_the_group,
    lets_go_of_groups_that_are_too_old,
    refuses_ways_that_are_not_in_the_ledger,
    comes_back_from_offload_unchanged,
    resumes_with_every_group_accounted_for,
    keeps_tokens_counters_and_promises_through_resumes,
    saved_states_do_not_change_later,
    goes_back_to_a_saved_state_in_place,
    numbers_groups_and_samples_uniquely_through_resumes,
    saves_without_changing_anything,
    trains_each_prompt_once_through_random_kills,
)


def make_config(folder: Path, *flags: str) -> Config:
    """The smallest configuration that a buffer can be made with."""
    (folder / "config.json").write_text("{}")
    (folder / "prompts.jsonl").write_text('{"prompt": "x", "label": "y"}\n')
    own = [
        "--hf-checkpoint",
        str(folder),
        "--prompt-data",
        str(folder / "prompts.jsonl"),
        "--run-dir",
        str(folder / "run"),
    ]
    return parse_config([*own, "--n-samples-per-prompt", str(GROUP_SIZE), *flags])


def check_buffer(spec: str, *flags: str) -> dict[str, str | None]:
    """Every check by name, with None where it passed and the traceback where it did not.

    Raises:
        ValueError: `spec` cannot be loaded or lacks a method.
    """
    cls = BUFFERS.load(spec)
    results: dict[str, str | None] = {}
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(Path(folder), *flags)
            runs = itertools.count()

            def make(config: Config = config, runs: Iterator[int] = runs) -> DataBuffer:
                """As after a restart elsewhere: nothing but the saved state is shared."""
                logging = replace(config.logging, run_dir=f"{config.run_dir}_{next(runs)}")
                return cls(replace(config, logging=logging), CountingSource())

            results[check.__name__] = _result(check, make)
    return results


def _result(check: Callable[[MakeBuffer], None], make: MakeBuffer) -> str | None:
    """None where the check passed, or what went wrong. One that does not end is left to itself."""
    answers: list[str | None] = []

    def run() -> None:
        try:
            check(make)
        except BaseException:  # whatever the buffer raises is its answer to this check
            answers.append(traceback.format_exc())
        else:
            answers.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CHECK_TIMEOUT_S)
    return answers[0] if answers else f"no end after {CHECK_TIMEOUT_S:g} s"


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m slime_rl.buffer.conformance package.module:Class")
        return 2
    try:
        results = check_buffer(argv[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, problem in results.items():
        print(f"{'ok    ' if problem is None else 'FAILED'} {name.replace('_', ' ')}")
        if problem is not None:
            print(problem)
    failed = sum(problem is not None for problem in results.values())
    print(f"{len(results) - failed} of {len(results)} behaviours")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
