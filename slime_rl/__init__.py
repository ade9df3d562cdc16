"""RL post-training for language models."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - for the one line that a user of an older Python gets
    raise ImportError(f"slime_rl needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable})")
