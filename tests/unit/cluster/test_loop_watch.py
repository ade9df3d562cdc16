from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from factories import make_config
from ray.exceptions import RayActorError

from slime_rl.cluster.cluster import Rollout
from slime_rl.cluster.loop_watch import BLOCKED_FILE

PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from slime_rl.cluster.loop_watch import watch_loop

async def reward():
    time.sleep(600)

async def main():
    watch_loop(1.0, Path(sys.argv[1]))
    await asyncio.sleep(1.5)  # waiting is not blocking
    print("still here", flush=True)
    if len(sys.argv) > 2:
        await asyncio.wait_for(reward(), 0.1)  # its deadline does not help

asyncio.run(main())
"""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "logs" / "blocked.txt"), *words]
    root = str(Path(__file__).resolve().parents[3])
    return subprocess.run(arguments, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=120)


def test_a_blocking_call_ends_the_process_and_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, "block")
    assert (found.returncode, found.stdout) == (70, "still here\n"), found.stderr
    text = (tmp_path / "logs" / "blocked.txt").read_text()
    assert text.startswith(f"{tmp_path}/program.py:7 in reward has blocked all generation and scoring for "), text
    assert "--group-timeout-s" in text


def test_an_old_report_is_removed_and_a_loop_that_turns_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "blocked.txt").write_text("of an earlier run")
    assert run(tmp_path).returncode == 0
    assert not (tmp_path / "logs" / "blocked.txt").exists()


@pytest.mark.parametrize("blocked", [True, False])
def test_the_end_of_the_rollout_process_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    def died(reference: Any) -> Any:
        raise RayActorError()

    monkeypatch.setattr(Rollout, "_start", lambda self, config: None)
    monkeypatch.setattr("ray.wait", lambda references, timeout: (references, []))
    monkeypatch.setattr("ray.get", died)
    config = make_config(tmp_path, "--reward-function-path", "mine:reward")
    if blocked:
        (config.run_dir / "logs").mkdir(parents=True)
        (config.run_dir / "logs" / BLOCKED_FILE).write_text("mine.py:3 in reward has blocked everything")
    kind, text = (TimeoutError, r"mine\.py:3 in reward") if blocked else (RuntimeError, "mine:reward.* Ray says: ")
    with pytest.raises(kind, match=text):
        Rollout(config).wait(None)
