"""The program that becomes an SGLang server, or that asks the installed SGLang about arguments.

    python -m slime_rl.engine.launch_engine serve cpu [sglang arguments]      a server on CPU; cpu-seeded: with seeds
    python -m slime_rl.engine.launch_engine serve cuda [sglang arguments]     a server on CUDA with API key or trace
    python -m slime_rl.engine.launch_engine check DEVICE [sglang arguments]   one JSON object about the arguments

A server on CUDA without either is plain `sglang.launch_server`. Here alone do the CPU's stand-ins come in.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NoReturn

from slime_rl.engine import traced_requests
from slime_rl.engine.api_key import with_key
from slime_rl.engine.traced_requests import without_trace


class RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check(argv: list[str]) -> dict[str, object]:
    """`options`: every option of SGLang's server with its field; `unknown` and `error`: what its parser says."""
    from sglang.srt.server_args import ServerArgs

    parser = RaisingParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = {option: action.dest for action in parser._actions for option in action.option_strings}
    try:
        _, unknown = parser.parse_known_args(argv)
    except ValueError as error:
        return {"options": options, "unknown": [], "error": str(error)}
    return {"options": options, "unknown": unknown, "error": None}


def serve(kind: str, argv: list[str]) -> None:
    """Run the server until it is shut down."""
    argv, trace = without_trace(argv)
    if kind == "cuda":
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        traced_requests.install(trace)
        run_server(prepare_server_args(argv))
        return
    from slime_rl.engine.cpu import launch

    launch.serve(argv, seeded=kind == "cpu-seeded", trace=trace)


def main() -> None:
    action, device, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
    if action == "serve":
        serve(device, with_key(argv))
        return
    if device == "cpu":
        from slime_rl.engine.cpu import stand_ins

        stand_ins.install()
    sys.stdout.write("\n" + json.dumps(check(argv)) + "\n")  # on a line of its own: imports may print


if __name__ == "__main__":
    main()
