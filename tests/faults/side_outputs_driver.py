"""A driver process with a flow for each operator of ``side_outputs.py``. Its argument: see ``test_side_outputs.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import side_outputs

import onceflow
from onceflow.planning import placement


def main() -> None:
    given = json.loads(sys.argv[1])
    side_outputs.use()
    spark = onceflow.session(app_name="side-outputs", master="local[2]", config={"spark.driver.memory": "2g"})
    placement.TASK_ROWS = given["task_rows"]
    queries = []
    for name, (operator, topics) in given["flows"].items():
        flow = onceflow.Flow(name, spark, bootstrap_servers=given["bootstrap"])
        frame = side_outputs.frame_of(
            flow,
            operator,
            side_outputs.Topics(**topics),
            records_per_batch=given["records_per_batch"],
            state_dir=str(Path(given["folder"]) / name),
        )
        queries.append(flow.write(frame, topic=topics["target"], engine="tasks").start())
    for query in queries:
        query.processAllAvailable()
        query.stop()
        print(query.flow, sum(batch.attempts - 1 for batch in query.batches), query.batches[-1:], flush=True)


if __name__ == "__main__":
    main()
