from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime_rl.buffer import payloads
from slime_rl.buffer.conformance import check_buffer
from slime_rl.buffer.contract_scene import fill
from slime_rl.buffer.packed import PackedGroups
from slime_rl.buffer.payloads import PayloadStore
from slime_rl.data.state_files import load_state, save_state
from slime_rl.types import Group, Sample


def make_group(index: int, num_tokens: int = 20, **metadata: object) -> Group:
    samples = [
        Sample(index=index * 3 + i, group_index=index, rollout_id=index * 3 + i, prompt=f"p{index}", label=index)
        for i in range(3)
    ]
    for sample in samples:
        sample.metadata = dict(metadata)
    return fill(Group(group_index=index, source_index=index, epoch=1, samples=samples, attempts=2), num_tokens)


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("segment_*"))


def test_packing_gives_groups_back_equal() -> None:
    groups = [make_group(i, num_tokens=i, pair=(1, 2), image=b"\xff") for i in range(4)]
    groups[2].samples[1].prompt = "another"
    groups[3].samples[2].reward = None
    packed = PackedGroups.pack(groups)
    assert packed.unpack([2, 0, 3]) == [groups[2], groups[0], groups[3]]
    assert PackedGroups.concat([packed, packed.select([1])]).unpack([4]) == [groups[1]]


def test_packed_groups_survive_disk(tmp_path: Path) -> None:
    groups = [make_group(i) for i in range(3)]
    packed = PackedGroups.pack(groups)
    packed.save(tmp_path / "segment.safetensors")
    assert PackedGroups.load(tmp_path / "segment.safetensors").unpack(range(3)) == groups
    assert PackedGroups.from_flat(packed.to_flat()).unpack([1]) == [groups[1]]


def test_packing_names_what_cannot_be_written() -> None:
    with pytest.raises(ValueError, match=r"group 7: metadata\['handle'\] is a builtins.object"):
        PackedGroups.pack([make_group(7, handle=object())])


def test_over_the_budget_groups_go_to_files_and_come_back_equal(tmp_path: Path) -> None:
    store = PayloadStore(100_000, tmp_path)
    groups = [make_group(i, num_tokens=300) for i in range(60)]
    for group in groups:
        store.put(group)
        assert store.memory_bytes <= 100_000
    assert files(tmp_path)
    assert store.spilled_bytes > 0
    assert store.get_many([59, 0, 30]) == [groups[59], groups[0], groups[30]]
    for index in range(60):
        store.remove(index)
    assert (files(tmp_path), len(store), store.memory_bytes, store.spilled_bytes) == ([], 0, 0, 0)


def test_putting_a_group_again_replaces_it_wherever_it_was(tmp_path: Path) -> None:
    store = PayloadStore(None, tmp_path)
    store.put(make_group(0))
    store.offload()
    changed = make_group(0, num_tokens=2)
    store.put(changed)
    assert store.get_many([0]) == [changed]
    assert (len(store), files(tmp_path)) == (1, [])


def test_offload_frees_memory_and_onload_brings_everything_back(tmp_path: Path) -> None:
    store = PayloadStore(None, tmp_path)
    groups = [make_group(i) for i in range(5)]
    for group in groups:
        store.put(group)
    store.remove(3)
    store.offload()
    assert (store.memory_bytes, len(files(tmp_path))) == (0, 1)
    assert store.get_many([4, 0]) == [groups[4], groups[0]]
    store.onload()
    assert (store.spilled_bytes, files(tmp_path)) == (0, [])
    assert store.get_many([0, 1, 2, 4]) == [groups[i] for i in (0, 1, 2, 4)]


def test_many_groups_are_packed_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "FRESH_GROUPS", 8)
    store = PayloadStore(None, tmp_path)
    groups = [make_group(i, num_tokens=200) for i in range(30)]
    for group in groups:
        store.put(group)
    assert store.memory_bytes < 30 * 3 * 210 * 40
    assert store.get_many(range(30)) == groups
    assert [group for block in store.packed() for group in block.unpack(range(len(block)))] == groups


@contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses every byte beyond the fourth thousand of a file, in the middle of writing it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    store = PayloadStore(5_000, tmp_path)
    groups = [make_group(i, num_tokens=100) for i in range(3)]
    message = r"--buffer-spill-dir .*cannot write .*File too large.*raise --buffer-memory-bytes"
    with full_disk(), pytest.raises(ValueError, match=message):
        for group in groups:
            store.put(group)
    kept = [i for i in range(3) if i in store]
    assert kept and store.get_many(kept) == [groups[i] for i in kept]
    assert not list(tmp_path.glob("segment_*"))
    for group in groups[len(kept) :]:
        store.put(group)
    assert store.get_many(range(3)) == groups
    assert list(tmp_path.glob("segment_*"))


def test_a_checkpoint_of_spilled_groups_copies_them_file_by_file(tmp_path: Path) -> None:
    groups = [make_group(i, num_tokens=100) for i in range(20)]
    store = PayloadStore(5_000, tmp_path / "a")
    for group in groups:
        store.put(group)
    save_state(tmp_path / "buffer.json", {"payloads": [packed.to_flat() for packed in store.packed()]})
    store.close()
    for budget in (None, 5_000):
        resumed = PayloadStore(budget, tmp_path / f"b{budget}")
        flats = load_state(tmp_path / "buffer.json")["payloads"]
        resumed.load([PackedGroups.from_flat(flat) for flat in flats])
        assert resumed.get_many(range(20)) == groups
        assert (resumed.spilled_bytes > 0) == (budget is not None)
        assert budget is None or resumed.memory_bytes <= budget
        resumed.close()


def test_two_runs_cannot_share_a_spill_folder_and_left_overs_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "segment_000001.safetensors").write_bytes(b"of a killed run")
    first, second = PayloadStore(None, tmp_path), PayloadStore(None, tmp_path)
    first.put(make_group(0))
    first.offload()
    assert first.get_many([0]) == [make_group(0)]
    second.put(make_group(1))
    with pytest.raises(ValueError, match="another run uses this folder"):
        second.offload()
    first.close()
    second.offload()
    assert second.get_many([1]) == [make_group(1)]


def test_the_ledger_buffer_keeps_the_contract_with_most_groups_spilled() -> None:
    results = check_buffer("ledger", "--buffer-memory-bytes", "4000")
    assert results == dict.fromkeys(results)


def test_images_of_a_prompt_count_once_against_the_budget_and_go_to_disk(tmp_path: Path) -> None:
    store = PayloadStore(1_000_000, tmp_path)
    groups = [make_group(i) for i in range(4)]
    for number, group in enumerate(groups):
        image = bytes([number]) * 400_000
        for sample in group.samples:
            sample.metadata = {"images": [image]}
        before = store.memory_bytes
        store.put(group)
        if number == 0:
            assert 400_000 < store.memory_bytes - before < 420_000
    assert store.spilled_bytes > 0 and store.memory_bytes < 1_000_000
    assert store.get_many(range(4)) == groups
