"""The driver whose take-over is measured: it counts the records of each key, and says which process has counted.

``python -m onceflow_workshop.bench.standby_service JSON`` runs until SIGTERM. The JSON has ``servers``, ``flow``,
``source``, ``target`` and ``folder`` (for all local files), and optionally ``host`` (``standby_host=``), and ``master``
with ``config`` of a cluster.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onceflow
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON


class Counts(Processor):
    """The value of a result is that of the record, how many records its key has had, and the driver's process."""

    state = output = JSON

    def __init__(self, driver: int) -> None:
        self.driver = driver  # on a cluster, other processes count

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        count = state.get() or 0
        for record in records:
            count += 1
            yield Record(key, [record.value.decode(), count, self.driver])
        state.put(count)


def main() -> None:
    """Wait for the turn of this process, and run the flow."""
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    spark = onceflow.session(
        app_name=given["flow"],
        master=given.get("master", "local[2]"),
        config={
            "spark.driver.memory": "700m",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            **given.get("config", {}),
        },
    )
    flow = onceflow.Flow(
        given["flow"],
        spark,
        bootstrap_servers=given["servers"],
        standby=True,
        standby_host=given.get("host", "127.0.0.1"),
    )
    records = flow.read(given["source"])
    on_cluster = "master" in given
    state_dir = None if on_cluster else folder / "state"
    rows = flow.process(records, Counts(os.getpid()), table=f"{given['flow']}-table", state_dir=state_dir)
    engine = "tasks" if on_cluster else "driver"
    onceflow.serve(flow.write(rows, topic=given["target"], trigger="50 milliseconds", engine=engine))


if __name__ == "__main__":
    main()
