"""A driver process for crash tests: one flow, until everything is written. Argument: JSON, see ``Pipe.driver``."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import onceflow
from onceflow.driver.kafka import output_writer


def session(given: dict[str, Any]) -> Any:
    logging.basicConfig(level=logging.INFO if given.get("verbose") else logging.WARNING)
    return onceflow.session(
        app_name=given.get("flow", "flows"),
        master=given.get("master", "local[2]"),
        config={
            "spark.driver.memory": "700m",
            # The process lives for a few batches only: the second compiler would never pay.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            **given.get("spark", {}),
        },
    )


def start(given: dict[str, Any], spark: Any) -> Any:
    # Small data is to be written by as many tasks as large data would be.
    output_writer._TASK_BYTES = given.get("task_bytes", output_writer._TASK_BYTES)
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"], **given.get("flow_options", {}))
    until = given.get("until") and {int(partition): offset for partition, offset in given["until"].items()}
    source = flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 1000), until=until)
    rows = source.selectExpr(*given.get("columns", ["key", "value"]))
    return flow.write(rows, topic=given["target"], **given.get("write", {})).start()


def main() -> None:
    given = json.loads(sys.argv[1])
    query = start(given, session(given))
    print("started", flush=True)
    if given.get("forever"):
        query.awaitTermination()
    query.processAllAvailable()
    query.stop()
    print("done", [b.batch for b in query.batches], flush=True)


if __name__ == "__main__":
    main()
