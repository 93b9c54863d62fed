"""A service whose state is on the hosts of a cluster. Argument: JSON, see ``test_homes.py``."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import ledger
from pyspark.sql import SparkSession

import onceflow
from onceflow import hooks


def main() -> None:
    given = json.loads(sys.argv[1])
    ledger.use()
    spark = onceflow.session(given["flow"], master=given["master"], config=given["config"])
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    records = flow.read(given["source"], max_records_per_batch=2000)
    rows = flow.process(records, ledger.Ledger(), table=given["table"], copies=given["copies"])
    if given["shuffled"]:
        rows = rows.where("value IS NOT NULL")
    query = flow.write(rows, topic=given["target"], trigger="200 milliseconds", engine="tasks").start()
    hooks.observe(says_when_a_batch_begins)
    if given.get("tells_of_jobs"):
        threading.Thread(target=tell_of_jobs, args=[spark], daemon=True).start()
    onceflow.serve(query, more=told)


def says_when_a_batch_begins(step: str, *, batch: int | None, **facts: Any) -> None:
    if step == "begin":
        print(f"begin {batch}", flush=True)


def tell_of_jobs(spark: SparkSession) -> None:
    """How many jobs run now, whenever that has changed."""
    tracker, last = spark.sparkContext.statusTracker(), 0
    while True:
        count = len(tracker.getActiveJobsIds())
        if count != last:
            print(f"jobs {count}", flush=True)
        last = count
        time.sleep(0.1)


def told(query: Any) -> dict[str, Any]:
    (table,) = query.tables
    return {
        "attempts": {batch.batch: batch.attempts for batch in query.batches},
        "restored": table.restored,
        "copies": asdict(table.copies),
    }


if __name__ == "__main__":
    main()
