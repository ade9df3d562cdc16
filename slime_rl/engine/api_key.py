"""How the API key gets into SGLang and sglang-router, which take it as an argument only: they are told the file, and
read it inside their process. So the key is in no list of processes, which every user of a machine may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

OPTION = "--slime-api-key-file="


def key_file_arguments(path: str | None) -> list[str]:
    """What a command line says instead of the key."""
    return [] if path is None else [f"{OPTION}{Path(path).absolute()}"]


def with_key(argv: Sequence[str]) -> list[str]:
    """The arguments with the key in place of its file; to be used inside the process that needs it."""
    return [
        f"--api-key={Path(a.removeprefix(OPTION)).read_text().strip()}" if a.startswith(OPTION) else a for a in argv
    ]
