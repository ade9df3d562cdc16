"""A spill folder that goes away, is replaced or cannot be written to while the run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import make_config, write_prompts

from slime_rl.buffer.contract_scene import fill, indices, through_disk
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.types import Group


def make_buffer(tmp_path: Path, *flags: str) -> LedgerBuffer:
    data = ("--prompt-data", str(write_prompts(tmp_path / "p.jsonl", 50)), "--no-shuffle")
    spill = ("--buffer-spill-dir", str(tmp_path / "spill"))
    config = make_config(tmp_path, "--n-samples-per-prompt", "2", *data, *spill, *flags)
    return LedgerBuffer(config, FilePromptSource(config))


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")


def made_anew(folder: Path) -> None:
    """As by another run that found the name free."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "lock").touch()


FAULTS = [removed, a_file, made_anew]


def admitted(buffer: LedgerBuffer, count: int) -> list[Group]:
    groups = [fill(group) for group in buffer.reserve(count)]
    for group in groups:
        buffer.admit(group)
    return groups


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_written_any_more_is_named_and_memory_is_kept(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    buffer = make_buffer(tmp_path)
    admitted(buffer, 2)
    buffer.offload()
    buffer.take(0, 2)
    buffer.commit(0)  # nothing is in files any more
    groups = admitted(buffer, 4)
    fault(tmp_path / "spill")
    message = r"--buffer-spill-dir .*/spill: cannot write \d+ bytes.*No group in memory is lost"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            buffer.offload()
    assert buffer.take(1, 2) == groups[:2]
    resumed = make_buffer(tmp_path, "--run-dir", str(tmp_path / "again"))
    resumed.load_state_dict(through_disk(buffer.state_dict()))
    assert resumed.take(1, 2) == groups[:2] and resumed.take(2, 2) == groups[2:]
    buffer.commit(1)
    buffer.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_admitting_over_the_budget_keeps_the_group_when_it_cannot_be_spilled(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    buffer = make_buffer(tmp_path, "--buffer-memory-bytes", "1")
    first = admitted(buffer, 1)
    fault(tmp_path / "spill")
    (group,) = buffer.reserve(1)
    with pytest.raises(ValueError, match=r"--buffer-spill-dir .*/spill: cannot write .*raise --buffer-memory-bytes"):
        buffer.admit(fill(group))
    assert buffer.counts()["generated"] == 2 and buffer.get(group.group_index) == group
    with pytest.raises(ValueError, match=r"1 groups that were spilled to segment_000001.safetensors cannot be read"):
        buffer.get(first[0].group_index)


@pytest.mark.parametrize("fault", FAULTS)
def test_groups_in_files_that_are_gone_are_told_and_the_account_stays_as_it_was(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    buffer = make_buffer(tmp_path, "--replay-groups", "1")
    groups = admitted(buffer, 3)
    partial = fill(buffer.reserve(1)[0])
    buffer.requeue(partial)
    buffer.take(0, 2)
    buffer.offload()
    fault(tmp_path / "spill")
    message = r"--buffer-spill-dir .*/spill: \d groups that were spilled to .* cannot be read: .*--load"
    counts, cursor = buffer.counts(), buffer.source.state_dict()
    for action in (
        lambda: buffer.take(1, 1),
        lambda: buffer.take(0, 2),
        lambda: buffer.reserve(2),
        lambda: buffer.commit(0),
        lambda: buffer.get(groups[0].group_index),
        lambda: buffer.onload(),
        lambda: buffer.state_dict(),
    ):
        with pytest.raises(ValueError, match=message):
            action()
        assert (buffer.counts(), buffer.source.state_dict()) == (counts, cursor)
    with pytest.raises(ValueError, match=r"a group that was spilled|cannot be read|cannot write"):
        buffer.offload()
        buffer.take(1, 1)
    buffer.drop(groups[2], "given_up")  # lets go of a file that is not there
    buffer.close()


def test_a_segment_that_was_cut_short_is_named(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    admitted(buffer, 2)
    buffer.offload()
    (segment,) = (tmp_path / "spill").glob("segment_*")
    segment.write_bytes(segment.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"--buffer-spill-dir .*2 groups that were spilled to segment_000001"):
        buffer.take(0, 2)
    assert len(buffer) == 2


def test_a_segment_with_other_bytes_is_named(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    admitted(buffer, 2)
    buffer.offload()
    (segment,) = (tmp_path / "spill").glob("segment_*")
    content = segment.read_bytes()
    segment.write_bytes(content.replace(b'"source_index"', b'"source_inde!"').replace(b'"samples":', b'"sample?":'))
    with pytest.raises(
        ValueError, match=r"2 groups that were spilled to segment_000001.safetensors cannot be read: Key"
    ):
        buffer.take(0, 2)
    assert len(buffer) == 2


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    (folder / "segment_data").mkdir(parents=True)
    (folder / "segment_audio.wav").write_text("sound")
    (folder / "lock").write_text("note")
    (folder / "segment_000001.safetensors").write_text("of a run that was killed")
    buffer = make_buffer(tmp_path)
    groups = admitted(buffer, 2)
    buffer.offload()
    assert buffer.take(0, 2) == groups
    assert (folder / "segment_audio.wav").exists() and (folder / "segment_data").is_dir()
    assert (folder / "lock").read_text() == "note"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    groups = admitted(buffer, 2)
    a_file(tmp_path / "spill")
    with pytest.raises(ValueError, match=r"--buffer-spill-dir .*/spill: cannot write .*File exists"):
        buffer.offload()
    (tmp_path / "spill").unlink()
    buffer.offload()  # once it is out of the way, all goes on
    assert buffer.take(0, 2) == groups


def test_a_run_goes_on_when_the_folder_is_put_back(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path)
    groups = admitted(buffer, 2)
    buffer.offload()
    (tmp_path / "spill").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="--buffer-spill-dir"):
        buffer.take(0, 2)
    (tmp_path / "elsewhere").rename(tmp_path / "spill")
    assert indices(buffer.take(0, 2)) == indices(groups)
    admitted(buffer, 1)
    buffer.offload()
