"""What is taken for the vocabulary of sglang-router, and what is not."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import fetch_router_vocabulary as tool


def offer(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[list[str]]:
    """Let pip find a wheel that holds `content`, or none; the commands it gets."""
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "litellm.whl", "w") as wheel:
                wheel.writestr(tool.MEMBER, content)
        return subprocess.CompletedProcess(command, int(content is None), "", "no matching distribution")

    monkeypatch.setattr(tool.subprocess, "run", pip)
    return commands


def test_the_file_is_fetched_once_and_again_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.vocabulary, "SHA256", hashlib.sha256(b"right").hexdigest())
    commands = offer(monkeypatch, b"right")
    for _ in range(2):
        assert tool.main(["--output", str(tmp_path / "v")]) == 0
    assert f"export TIKTOKEN_ENCODINGS_BASE={tmp_path / 'v'}\n" in capsys.readouterr().out
    assert len(commands) == 1
    (tmp_path / "v" / tool.NAME).write_bytes(b"cut")
    assert tool.fetch(tmp_path / "v").read_bytes() == b"right"
    assert [path.name for path in (tmp_path / "v").iterdir()] == [tool.NAME]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"wrong", "must have the SHA-256 .* got 5 other bytes"),
        (None, "must give a wheel, got: no matching distribution"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    offer(monkeypatch, content)
    with pytest.raises(ValueError, match=message):
        tool.fetch(tmp_path / "v")
    assert tool.main(["--output", str(tmp_path / "v")]) == 2 and not (tmp_path / "v").exists()
