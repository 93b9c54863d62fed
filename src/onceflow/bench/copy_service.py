"""A copy of one topic to another, with everything from the environment: for harnesses that compare systems.

``python -m onceflow.bench.copy_service`` reads ``B_BOOTSTRAP``, ``B_NAME`` (the flow), ``B_IN``, ``B_OUT``,
``B_COMMIT_MS`` (the trigger), ``B_STATE`` (a scratch folder) and ``B_HEAP``, and runs until SIGTERM.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import FrameType

from onceflow import Flow
from onceflow.session import session


def main() -> None:
    environment = os.environ
    state = Path(environment["B_STATE"])
    tempfile.tempdir = str(state)
    spark = session(
        app_name=environment["B_NAME"],
        master="local[2]",
        config={
            "spark.driver.memory": environment.get("B_HEAP", "1g"),
            "spark.local.dir": str(state / "local"),
            "spark.sql.warehouse.dir": str(state / "warehouse"),
        },
    )
    flow = Flow(environment["B_NAME"], spark, bootstrap_servers=environment["B_BOOTSTRAP"])
    df = flow.read(environment["B_IN"]).select("key", "value")
    trigger = f"{environment['B_COMMIT_MS']} milliseconds"
    query = flow.write(df, topic=environment["B_OUT"], partitioner="source", trigger=trigger).start()

    def stop(signal_number: int, frame: FrameType | None) -> None:
        query.stop()

    signal.signal(signal.SIGTERM, stop)
    query.awaitTermination()


if __name__ == "__main__":
    main()
