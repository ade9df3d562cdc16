"""Look at runs in a browser, live or finished.

    python -m slime_rl.dashboard RUN_DIR [RUN_DIR ...]      or a folder of runs; several are compared

Reads the folders only, so it may be started and stopped at any time, on any machine that sees them.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from pathlib import Path
from typing import NoReturn

from slime_rl.dashboard.runs import Runs

LOCAL = ("127.0.0.1", "localhost", "::1")


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all of slime_rl does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slime_rl.dashboard: {message}; --help tells what it takes\n")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to host:port.

    Raises:
        ValueError: somebody else has it, or there is no such address.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be 0 to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; --port 0 takes a free one") from error
    return listening


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; 2 for a folder that holds no run, and for what cannot be listened on."""
    parser = OneLineParser(prog="python -m slime_rl.dashboard", description="Look at runs in a browser.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run's folder, or a folder of runs")
    parser.add_argument("--port", type=int, default=8600, help="0 takes a free one (default: 8600)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines see all samples and flags")
    args = parser.parse_args(argv)
    try:
        runs = Runs(args.runs)
        listening = listen(args.host, args.port)
    except ValueError as error:
        print(f"slime_rl.dashboard: {error}", file=sys.stderr)
        return 2
    import uvicorn

    from slime_rl.dashboard.app import make_app

    count, port = len(runs.look()), listening.getsockname()[1]
    print(f"{count} run{'s'[: count != 1]} at http://{args.host}:{port} (ctrl-c ends it)", flush=True)
    app = make_app(runs, list(LOCAL) if args.host in LOCAL else None)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has closed everything, and raises it again
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
