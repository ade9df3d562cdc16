"""The program that holds a private Ray: starts it, writes its address to a file, and waits to be ended.

    python -m slime_rl.cluster.ray_head ADDRESS_FILE NUM_CPUS OBJECT_STORE_BYTES

It runs below a supervisor, so that Ray's daemons (of which some outlive a killed driver) end with the run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray


def main() -> None:
    address_file, num_cpus, object_store_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    context: Any = ray.init(
        address="local",  # also where RAY_ADDRESS, or what an ended cluster has left behind, names another
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        _temp_dir=tempfile.gettempdir(),  # the supervisor's own folder, short and removed at the end
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    aside = address_file.with_name(address_file.name + ".partial")
    aside.write_text(context.address_info["gcs_address"])
    os.replace(aside, address_file)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
