"""A service on a Spark cluster that grows and shrinks. Argument: JSON, see ``test_growing_cluster.py``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ledger
from pyspark import cloudpickle

import onceflow
from onceflow.planning import placement


class Slow(ledger.Ledger):
    """Takes its time over each partition."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def open(self, partition: int) -> None:
        time.sleep(self.seconds)


def main() -> None:
    given = json.loads(sys.argv[1])
    ledger.use()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark = onceflow.session(given["flow"], master=given["master"], config=given["config"])
    placement.TASK_ROWS = given["task_rows"]
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    records = flow.read(given["source"], max_records_per_batch=2000)
    rows = flow.process(records, Slow(given["partition_s"]), table=given["table"]).where("value IS NOT NULL")
    go_on = Path(given["folder"]) / "start"
    print("processed", flush=True)
    while not go_on.exists():  # workers may come between the two calls
        time.sleep(0.05)
    query = flow.write(rows, topic=given["target"], trigger="200 milliseconds", engine="tasks").start()
    onceflow.serve(query, more=attempts)


def attempts(query: Any) -> dict[str, Any]:
    return {"attempts": {batch.batch: batch.attempts for batch in query.batches}}


if __name__ == "__main__":
    main()
