"""A group that cannot be kept is refused before the account changes, and the others are not hindered by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import make_config, write_prompts

from slime_rl.buffer import payloads
from slime_rl.buffer.contract_scene import fill, indices, through_disk
from slime_rl.buffer.keepable import check_and_weigh
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.packed import PackedGroups
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.buffer.sources.own import OwnSource
from slime_rl.types import Group, Sample, Status


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    data = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 50)), "--no-shuffle")
    config = make_config(tmp_path, "--n-samples-per-prompt", "2", *data, *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def on(name: str, value: Any) -> Callable[[Sample], None]:
    return lambda sample: setattr(sample, name, value)


UNFIT: list[tuple[Callable[[Sample], None], str]] = [
    (lambda s: s.metadata.update(lock=threading.Lock()), r"metadata\['lock'\] is a _thread.lock"),
    (lambda s: s.metadata.update(deep=[{"x": object()}]), r"metadata\['deep'\]\[0\]\['x'\] is a builtins.object"),
    (lambda s: s.metadata.update(array=np.array([object()])), r"metadata\['array'\] is a numpy.ndarray"),
    (on("metadata", circular()), "RecursionError"),
    (on("label", nested(5000)), "RecursionError"),
    (on("label", {1, 2}), "label is a builtins.set"),
    (on("label", 10**5000), "group 1: "),
    (lambda s: s.reward_info.update(value=[10**5000]), "group 1: "),
    (lambda s: s.metadata.update(t=torch.ones(2, device="meta")), "group 1: "),
    (lambda s: s.metadata.update(t=torch.nn.Parameter(torch.ones(2))), r"metadata\['t'\] is a torch.nn.parameter"),
    (lambda s: s.metadata.update(a=np.ma.masked_array([1, 2], [0, 1])), r"metadata\['a'\] is a numpy"),
    (lambda s: s.metadata.update(a=np.zeros(2, dtype=[("x", "i4")])), r"metadata\['a'\] is a numpy.ndarray"),
    (on("reward", 1e200), "sample 3 has reward 1e[+]200, which is no number that float32 can hold"),
    (on("reward", float("nan")), "sample 3 has reward nan"),
    (on("reward", Decimal("0.5")), "sample 3 has reward Decimal"),
    (lambda s: s.tokens.__setitem__(-1, -1), "sample 3 has token -1; tokens must be >= 0"),
    (on("reward_info", {"f": len}), r"reward_info\['f'\]"),
    (on("prompt", [{"role": "user", "content": object()}]), r"prompt\[0\]\['content'\]"),
    (on("response", b"bytes".__iter__()), "response is a"),
    (on("reward", "high"), "group 1: "),
    (on("reward", 10**400), "group 1: "),
    (on("status", "completed"), "group 1: "),
    (lambda s: s.tokens.__setitem__(-1, 2**40), "group 1: "),
    (lambda s: s.tokens.__setitem__(slice(0, 2), [2**40, -(2**40)]), "group 1: "),
    (lambda s: s.tokens.__setitem__(-1, None), "group 1: "),
    (lambda s: s.tokens.__setitem__(-1, 3.5), r"tokens of sample 3 cannot be kept: 3.5 would come back as 3 at \d"),
    (lambda s: s.loss_mask.__setitem__(0, 0.5), "loss_mask of sample 3 cannot be kept: 0.5 would come back as 0 at 0"),
    (lambda s: s.loss_mask.__setitem__(0, 1000), "group 1: "),
    (lambda s: s.rollout_log_probs.__setitem__(0, None), "group 1: .*rollout_log_probs|group 1: "),
    (lambda s: s.weight_versions.__setitem__(0, "4"), "group 1: "),
    (lambda s: s.weight_versions.pop(), r"sample 3 has \d response tokens, but \{'weight_versions': \d\}"),
    (lambda s: s.tokens.pop(), "sample 3 has .* response tokens, but .*Sample.append_tokens"),
    (on("index", "three"), "group 1: "),
    (on("rollout_id", 2**70), "group 1: "),
]


@pytest.mark.parametrize(("spoil", "message"), UNFIT, ids=[str(i) for i in range(len(UNFIT))])
@pytest.mark.parametrize("action", ["admit", "requeue"])
def test_a_group_that_cannot_be_kept_is_refused_by_name_and_nothing_changes(
    tmp_path: Path, spoil: Callable[[Sample], None], message: str, action: str
) -> None:
    buffer = make_buffer(tmp_path)
    good, bad, other = (fill(group) for group in buffer.reserve(3))
    buffer.admit(good)
    spoil(bad.samples[1])
    before = buffer.counts()
    with pytest.raises(ValueError, match=message):
        getattr(buffer, action)(bad)
    assert buffer.counts() == before and len(buffer.payloads) == 1
    buffer.admit(other)
    buffer.offload()
    buffer.state_dict()
    assert indices(buffer.take(0, 2)) == [0, 2]
    buffer.drop(bad, "unfit")


def test_what_is_fit_comes_back_equal_however_unusual(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    (group,) = buffer.reserve(1)
    first, second = fill(group).samples
    first.metadata = {
        "nan": float("nan"),
        "array": np.arange(3),
        "tensor": torch.ones(2, dtype=torch.bfloat16),
        "scalar": np.float32(0.5),
        "status": Status.FAILED,
        "deep": nested(80),
        (1, "key"): b"\xff",
        "long": 12345678901234567890123,
    }
    first.loss_mask[0] = 0
    second.tokens = list(np.array(second.tokens))
    second.reward = True
    buffer.admit(group)
    (again,) = PackedGroups.pack([group]).unpack([0])
    assert again.samples[1].tokens == second.tokens and again.samples[0].loss_mask == first.loss_mask
    buffer.offload()
    (taken,) = buffer.take(0, 1)
    assert taken.samples[0].metadata["scalar"] == 0.5 and taken.samples[0].metadata["deep"] == nested(80)
    assert taken.samples[0].metadata["long"] == 12345678901234567890123


def test_the_weight_counts_tokens_texts_and_shared_images_once() -> None:
    image, text = b"\0" * 1_000_000, "x" * 10_000
    samples = [Sample(index=i, group_index=0, rollout_id=i, prompt=text, metadata={"image": image}) for i in range(4)]
    group = fill(Group(group_index=0, source_index=0, epoch=0, samples=samples), 100)
    weight = check_and_weigh(group)
    assert 1_010_000 + 4 * 100 * 100 < weight < 1_100_000
    samples[0].metadata["set"] = np.float64(1.0)  # a doubt: weighed as it is packed
    assert check_and_weigh(group) > 1_000_000


def test_one_bad_group_among_many_does_not_stop_the_packing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "FRESH_GROUPS", 4)
    buffer = make_buffer(tmp_path)
    for number, group in enumerate(fill(group) for group in buffer.reserve(20)):
        if number % 5 == 0:
            group.samples[0].metadata["bad"] = object()
            with pytest.raises(ValueError, match=f"group {number}: "):
                buffer.admit(group)
            buffer.drop(group, "bad")
        else:
            buffer.admit(group)
    assert len(buffer.take(0, 16)) == 16


class BadSource:
    """Gives what `answer` says."""

    answer: Any = None

    def __init__(self, config: Any) -> None: ...

    def next_prompts(self, num_prompts: int) -> Any:
        return self.answer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "gave a NoneType where 1 were asked for"),
        ([], "gave 0 prompts where 1 were asked for"),
        (["text"], "must give pairs of epoch and Prompt, got 'text'"),
        ([(0, "text")], "must give pairs of epoch and Prompt"),
    ],
)
def test_a_source_that_gives_something_else_is_named_and_nothing_changes(
    tmp_path: Path, answer: Any, message: str
) -> None:
    buffer = make_buffer(tmp_path)
    source: Any = BadSource(None)
    source.answer = answer
    buffer.source = OwnSource(source, "--data-source-path my:Source")
    with pytest.raises(ValueError, match=f"--data-source-path my:Source {message}"):
        buffer.reserve(1)
    assert buffer.counts()["reserved"] == 0 and buffer.ledger.next_group_index == 0
    buffer.state_dict()


def test_a_conjugate_view_comes_back_equal(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    (group,) = buffer.reserve(1)
    value = torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj()
    fill(group).samples[0].metadata["t"] = value
    buffer.admit(group)
    again = make_buffer(tmp_path)
    again.load_state_dict(through_disk(buffer.state_dict()))
    assert torch.equal(again.take(0, 1)[0].samples[0].metadata["t"], value.resolve_conj())
