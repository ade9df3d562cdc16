from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_runs import write_run
from dashboard_site import serve


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def url(run_dir: Path) -> Iterator[str]:
    with serve([run_dir]) as address:
        yield address
