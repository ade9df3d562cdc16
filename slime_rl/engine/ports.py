"""Addresses for servers of our own. No port is fixed, so that several runs share a machine."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel takes ports of outgoing connections: one of those would otherwise be handed
# out between our check and the server's bind.
LOWEST_PORT, HIGHEST_PORT = 10_000, 32_000
TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nothing listens on. Another process may take it before it is used: be ready to retry.

    Raises:
        RuntimeError: none of many random ports could be bound.
    """
    source = random.SystemRandom()  # not the seeded one: two runs with one seed must not choose the same ports
    reason: OSError | None = None
    for _ in range(TRIES):
        port = source.randrange(LOWEST_PORT, HIGHEST_PORT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                reason = error
                continue
            return port
    raise RuntimeError(f"no free port on {host}: {TRIES} ports in {LOWEST_PORT}-{HIGHEST_PORT} refused, last: {reason}")


def node_ip() -> str:
    """This machine's address on the network it reaches others by; 127.0.0.1 without one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # a datagram socket only looks up the route
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
