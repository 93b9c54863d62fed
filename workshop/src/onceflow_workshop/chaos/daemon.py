"""Spark's Python daemon on a host with simulated reboots: its workers take the boot id from a file.

``spark.python.daemon.module`` names this module. Everything else is PySpark's own daemon.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark import daemon

from onceflow.host import identity

VARIABLE = "ONCEFLOW_CHAOS_BOOT"


def main() -> None:
    """Run the daemon until Spark ends it."""
    file = Path(os.environ[VARIABLE])
    identity.boot_id = file.read_text  # type: ignore[assignment]
    daemon.manager()


if __name__ == "__main__":
    main()
