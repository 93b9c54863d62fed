"""Spark's Python daemon on a host that seems to reboot: the boot id that its workers see is in a file.

``spark.python.daemon.module`` names this module. Everything else is PySpark's own daemon.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark import daemon

from onceflow.host import identity

VARIABLE = "ONCEFLOW_CHAOS_BOOT"


def main() -> None:
    """The daemon, until Spark ends it."""
    file = Path(os.environ[VARIABLE])
    identity.boot_id = file.read_text  # type: ignore[assignment]
    daemon.manager()


if __name__ == "__main__":
    main()
