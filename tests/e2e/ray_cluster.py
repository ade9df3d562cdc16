"""A real Ray of several nodes on this machine, whose CPUs and GPUs are only numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

TRIES = 3  # Ray gives up by itself when a node is not up within 30 s, which happens on a busy machine
SMALL: dict[str, Any] = {"object_store_memory": 80 * 2**20}


@contextmanager
def ray_cluster(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """Nodes with these resources, the head first; this process has joined them for the time of the block."""
    for tries in range(TRIES):
        cluster = Cluster()
        try:
            for number, node in enumerate(nodes):
                cluster.add_node(**SMALL, **({} if number else {"include_dashboard": False}), **node)
            break
        except Exception:
            cluster.shutdown()
            if tries == TRIES - 1:
                raise
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
