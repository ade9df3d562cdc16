"""The program that becomes the router. Goes straight to sglang-router's binary part: its own launcher imports sglang
where that is installed, which takes seconds and 400 MB.

    python -m slime_rl.engine.launch_router [sglang-router arguments]
"""

from __future__ import annotations

import argparse
import sys

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

from slime_rl.engine.api_key import with_key


def main() -> None:
    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    arguments = RouterArgs.from_cli_args(parser.parse_args(with_key(sys.argv[1:])), use_router_prefix=False)
    Router.from_args(arguments).start()


if __name__ == "__main__":
    main()
