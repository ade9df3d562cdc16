"""The program that holds a private Ray: starts it, writes its address to a file, and waits to be ended.

    python -m slime_rl.cluster.ray_head ADDRESS_FILE NUM_CPUS OBJECT_STORE_BYTES

It runs below a supervisor, so that Ray's daemons (of which some outlive a killed driver) end with the run. Of them only
those start that a run needs: `ray.init` would start three more, each a second of CPU and 100 MB, and this program would
be a driver with workers of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams


class Head(Node):
    """A head node without the dashboard's server, which Ray starts even where there is to be no dashboard."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        pass


def main() -> None:
    address_file, num_cpus, object_store_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("ray").setLevel(logging.ERROR)
    parameters = RayParams(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        temp_dir=tempfile.gettempdir(),  # the supervisor's own folder, short and removed at the end
        no_monitor=True,  # nothing is scaled
        # The driver does not show the workers' output. Ray annotates a str and takes a bool.
        include_log_monitor=False,  # pyright: ignore[reportArgumentType]
    )
    head = Head(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False)
    aside = address_file.with_name(address_file.name + ".partial")
    aside.write_text(head.gcs_address)
    os.replace(aside, address_file)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
