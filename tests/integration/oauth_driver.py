"""A driver process for ``test_oauth``: flows that run until a file is there. Argument: JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import onceflow
from onceflow.spark import token_endpoint


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    spark = onceflow.session(
        app_name="oauth",
        master=given["master"],
        config={
            "spark.driver.memory": "700m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            **given.get("spark", {}),
        },
    )
    spark.sparkContext.setLogLevel("INFO")
    flows, queries = [], []
    for each in given["flows"]:
        flow = onceflow.Flow(each["flow"], spark, bootstrap_servers=given["bootstrap"], options=each["options"])
        df = flow.read(each["source"]).select("key", "value")
        queries.append(flow.write(df, topic=each["target"], **each["write"]).start())
        flows.append(flow)
        df.explain(True)
    print("endpoints", list(token_endpoint._endpoints.values()))
    print("started", flush=True)
    while not Path(given["stop"]).exists():
        assert all(query.isActive for query in queries), [query.exception() for query in queries]
        time.sleep(0.2)
    for query in queries:
        query.processAllAvailable()
        print([progress.json for progress in query.recentProgress], query.status, list(query.batches))
    for flow in flows:
        flow.close()
    print("configuration", spark.sparkContext.getConf().getAll())
    spark.stop()


if __name__ == "__main__":
    main()
