"""A file that goes to the disk while it is written is the file that was written."""

from __future__ import annotations

from pathlib import Path

from slime_rl.data.write_behind import PIECE, WriteBehind


def test_the_file_is_what_was_written(tmp_path: Path) -> None:
    parts = [bytes([i]) * size for i, size in enumerate((10, PIECE, 3, 2 * PIECE + 1, 7))]
    with open(tmp_path / "file", "wb") as file:
        behind = WriteBehind(file)
        for part in parts:
            file.write(part)
            behind.advance()
        behind.finish()
        assert (tmp_path / "file").read_bytes() == b"".join(parts)  # nothing is left in a buffer
