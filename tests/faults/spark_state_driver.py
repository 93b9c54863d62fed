"""A driver process for crash tests of queries with state in Spark. Argument: JSON, see ``SparkStatePipe.driver``."""

from __future__ import annotations

import json
import logging
import sys

from spark_state_queries import QUERIES

import onceflow


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    spark = onceflow.session(
        app_name=given["flow"],
        master="local[2]",
        config={
            "spark.driver.memory": "700m",
            "spark.sql.shuffle.partitions": "2",
            # The process lives for a few batches only: the second compiler would never pay.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            **given.get("spark", {}),
        },
    )
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"])
    left, right = (flow.read(topic, max_records_per_batch=given["records_per_batch"]) for topic in given["sources"])
    query = flow.write(
        QUERIES[given["query"]](left, right), topic=given["target"], checkpoint=given["checkpoint"]
    ).start()
    print("started", flush=True)
    query.processAllAvailable()
    query.stop()
    print("done", [b.batch for b in query.batches], "drained", query.drained, flush=True)


if __name__ == "__main__":
    main()
