"""Makes the scripted engine of the rollout tests importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

ROLLOUT_TESTS = str(Path(__file__).parent.parent)
if ROLLOUT_TESTS not in sys.path:
    sys.path.insert(0, ROLLOUT_TESTS)
