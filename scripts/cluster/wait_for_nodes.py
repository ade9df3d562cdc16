"""Returns when a Ray cluster has its nodes: python wait_for_nodes.py HEAD_IP:PORT COUNT [LIMIT_S]"""

from __future__ import annotations

import logging
import sys
import time

import ray


def main(argv: list[str]) -> int:
    address, count, limit_s = argv[0], int(argv[1]), float(argv[2]) if len(argv) > 2 else 300.0
    deadline, found = time.monotonic() + limit_s, 0
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            found = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:
            found = 0  # the head is still starting
        if found >= count:
            return 0
        time.sleep(1)
    print(f"wait_for_nodes: {found} of {count} nodes at {address} after {limit_s:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
