"""A run whose console cannot be written to goes on, and ends with its own exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import os, sys
from slime_rl.observability.streams import keep_standard_streams, say
keep_standard_streams()
for number in range(3):
    os.fstat(number)
opened = os.open(os.devnull, os.O_RDONLY)
assert opened > 2
for number in range(20000):
    say(f"step {number} · {'x' * 20}")
    say(f"problem {number}", sys.stderr)
with open(sys.argv[1], "w") as file:
    file.write("done")
sys.exit(7)
"""


@pytest.mark.parametrize(
    "command",
    ["{} | head -1", "{} 2>&1 | head -1", "{} >&-", "{} >&- 2>&-", "{} <&- >&- 2>&-", "{} >/dev/full 2>/dev/full"],
)
def test_nobody_listens(tmp_path: Path, command: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = tmp_path / "done"
    line = command.format(f"PYTHONPATH={ROOT} PYTHONIOENCODING=ascii {sys.executable} {tmp_path}/program.py {done}")
    found = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, timeout=300)
    assert found.returncode == 7, found.stderr[-500:]
    assert done.read_text() == "done"
    if command.endswith("head -1"):
        assert found.stdout.splitlines()[0].startswith(("step 0 \\xb7 ", "problem 0"))
    assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr
