"""Look at runs in a browser, live or finished.

    python -m slime_rl.dashboard RUN_DIR [RUN_DIR ...]      or a folder of runs; several are compared

Reads the folders only, so it may be started and stopped at any time, on any machine that sees them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_rl.dashboard.runs import find_runs


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; 2 for a folder that holds no run."""
    parser = argparse.ArgumentParser(prog="python -m slime_rl.dashboard", description="Look at runs in a browser.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines see all samples and flags")
    args = parser.parse_args(argv)
    try:
        runs = find_runs(args.runs)
    except ValueError as error:
        print(f"slime_rl.dashboard: {error}", file=sys.stderr)
        return 2
    import uvicorn

    from slime_rl.dashboard.app import make_app

    is_local = args.host in ("127.0.0.1", "localhost")
    print(f"{len(runs)} run{'s'[: len(runs) != 1]} at http://{args.host}:{args.port} (ctrl-c ends it)", flush=True)
    app = make_app(runs, ["127.0.0.1", "localhost"] if is_local else None)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
