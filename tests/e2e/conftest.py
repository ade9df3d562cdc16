from __future__ import annotations

from pathlib import Path

import pytest

from tools.make_quickstart import main as make_quickstart


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data, with a held-out part of 16 rows."""
    folder = tmp_path_factory.mktemp("quickstart")
    make_quickstart(["--output", str(folder)])
    heldout = (folder / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(heldout[:16]))
    return folder
