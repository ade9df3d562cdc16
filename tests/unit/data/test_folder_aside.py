"""A folder that appears whole or not at all, and what processes that were killed leave beside it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_rl.data import folder_aside as module
from slime_rl.data.folder_aside import folder_aside, replace_folder

ROOT = Path(__file__).resolve().parents[3]
# Holds a folder aside, with a part written, until it is killed; "replacing": in the moment where nothing has the name.
HOLDER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slime_rl.data.folder_aside import folder_aside

path = Path(sys.argv[2])
with folder_aside(path) as aside:
    (aside / "part").write_text("half")
    if sys.argv[3] == "replacing":
        os.replace(path, aside.with_name("old"))
    print("ready", flush=True)
    time.sleep(600)
"""


def hold(path: Path, how: str = "writing") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(ROOT), str(path), how]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    return holder


def kill(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate(timeout=30)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is writing tmp_path/it."""
    holder = hold(tmp_path / "it")
    yield holder
    kill(holder)


def write(path: Path, text: str = "new") -> None:
    with folder_aside(path) as aside:
        (aside / "file").write_text(text)
        replace_folder(aside, path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_and_replaces_another_with_nothing_beside_it(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write(tmp_path / "in" / "it", text)
        assert names(tmp_path / "in") == ["it"] and names(tmp_path / "in" / "it") == ["file"]
        assert (tmp_path / "in" / "it" / "file").read_text() == text


def test_leftovers_of_the_killed_are_removed_and_those_of_the_running_are_not(
    tmp_path: Path, running: subprocess.Popen[str]
) -> None:
    kill(hold(tmp_path / "it"))
    assert len(names(tmp_path)) == 2
    write(tmp_path / "it")
    (live,) = tmp_path.glob(".it.*.partial")
    assert (live / "new" / "part").read_text() == "half" and running.poll() is None
    kill(running)
    write(tmp_path / "it")
    assert names(tmp_path) == ["it"]


def test_only_leftovers_of_the_same_name_are_removed(tmp_path: Path) -> None:
    for name in ("it.b", "i", "[it]", "it_"):
        kill(hold(tmp_path / name))
    for name in (".it.original", ".it.settings.partial", "it.abcdefgh.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    (tmp_path / ".it.a_file_0.partial").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".it.aa_link0.partial").symlink_to("elsewhere")
    before = names(tmp_path)
    write(tmp_path / "it")
    assert names(tmp_path) == sorted([*before, "it"])
    write(tmp_path / "[it]")
    assert len(names(tmp_path)) == len(before) + 1  # one less, one more


def test_killed_while_replacing_the_old_folder_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "it", "old")
    kill(hold(tmp_path / "it", "replacing"))
    assert "it" not in names(tmp_path)
    with pytest.raises(ValueError, match="stopped"), folder_aside(tmp_path / "it"):
        raise ValueError("stopped")
    assert names(tmp_path) == ["it"] and (tmp_path / "it" / "file").read_text() == "old"


def test_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    write(tmp_path / "it", "old")
    with pytest.raises(FileNotFoundError), folder_aside(tmp_path / "it") as aside:
        aside.rmdir()
        replace_folder(aside, tmp_path / "it")
    assert names(tmp_path) == ["it"] and (tmp_path / "it" / "file").read_text() == "old"


def test_a_folder_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = module.tempfile.mkdtemp, []

    def make_and_sweep(**place: object) -> str:
        made.append(make(**place))
        if len(made) == 1:
            module._remove_leftovers(tmp_path / "it")
        return made[-1]

    monkeypatch.setattr(module.tempfile, "mkdtemp", make_and_sweep)
    write(tmp_path / "it")
    assert len(made) == 2 and names(tmp_path) == ["it"]


def test_many_at_the_same_time_all_end_with_a_whole_folder(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write_often(which: int) -> None:
        try:
            for i in range(30):
                with folder_aside(tmp_path / "it") as aside:
                    (aside / "file").write_text(f"{which} {i}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write_often, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and names(tmp_path) == []


def test_a_disk_that_takes_no_file_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(outer: Path, *, wait: bool) -> int:
        raise OSError(28, "No space left on device", str(outer / "lock"))

    monkeypatch.setattr(module, "_lock", refuse)
    with pytest.raises(OSError, match="No space left"), folder_aside(tmp_path / "it"):
        pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_writes_and_removes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(hold(tmp_path / "it"))

    def refuse(handle: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "it")
    assert len(names(tmp_path)) == 2 and (tmp_path / "it" / "file").read_text() == "new"
