"""A driver process for crash tests: one flow, until everything is written. Argument: JSON, see ``Pipe.driver``."""

from __future__ import annotations

import json
import logging
import sys

import onceflow
from onceflow.sink import batch


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    spark = onceflow.session(
        app_name=given["flow"],
        master=given.get("master", "local[2]"),
        config={
            "spark.driver.memory": "700m",
            # The process lives for a few batches only: the second compiler would never pay.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            **given.get("spark", {}),
        },
    )
    # Small data is to be written by as many tasks as large data would be.
    batch._TASK_BYTES = given.get("task_bytes", batch._TASK_BYTES)
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    source = flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 1000))
    write = given.get("write", {})
    query = flow.write(source.select("key", "value"), topic=given["target"], **write).start()
    print("started", flush=True)
    if given.get("forever"):
        query.awaitTermination()
    query.processAllAvailable()
    query.stop()
    print("done", [b.batch for b in query.batches], flush=True)


if __name__ == "__main__":
    main()
