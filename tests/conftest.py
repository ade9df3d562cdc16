"""Makes `tests/factories.py` importable from every test, whatever folder it lies in."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent
for folder in (str(TESTS.parent), str(TESTS)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
