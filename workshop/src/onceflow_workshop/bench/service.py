"""The services that benchmarks measure, with everything from the environment.

``python -m onceflow_workshop.bench.service`` runs until SIGTERM. Harnesses that compare systems start it, too:

- ``B_WORKLOAD``: ``w1`` (the default) copies a topic, ``w2`` keeps the balances of accounts.
- ``B_BOOTSTRAP``, ``B_IN``, ``B_OUT``: the broker and the topics.
- ``B_NAME``: the flow; the table of its balances is called ``<flow>-table``.
- ``B_COMMIT_MS``: the trigger, in milliseconds.
- ``B_GUARANTEE``: ``eos`` (the default) or ``alo``: exactly once, or at least once.
- ``B_STATE``: a folder for all local files. ``B_HEAP``: memory of Spark's JVM (``1g``).
- ``B_ENGINE``: ``auto``, ``driver`` or ``tasks``; it is given to ``Flow.write`` when it is set.
- ``B_RECORDS_PER_BATCH``: bounds a batch of balances (100,000): of a backlog, so many records are one transaction.
- ``B_VARIANT``: balances by ``records`` (the default) or by ``columns``.
- ``B_RAN``: a file, for the engine and the ways in which it ran the last batches (``BatchSummary.path``), in JSON.
- ``B_PARENT``: the process that has started it. When that has ended, the service stops by itself.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from onceflow import Flow
from onceflow.session import session
from onceflow_workshop.bench.balances import Balance, ColumnBalance

_RECORDS_PER_BATCH = 100_000
_GUARANTEES = {"eos": "exactly_once", "alo": "at_least_once"}
_PARENT_S = 1.0


def main() -> None:
    """Run the service."""
    query = _started()
    parent = os.environ.get("B_PARENT")
    run_until_stopped(query, int(parent) if parent else None)
    if ran := os.environ.get("B_RAN"):
        paths = list(dict.fromkeys(batch.path for batch in query.batches))
        Path(ran).write_text(json.dumps({"engine": query.engine, "paths": paths}))


def run_until_stopped(query: Any, parent: int | None) -> None:
    """Until SIGTERM, or until this process, which has started the service, has ended."""
    stopped = threading.Event()

    def stop(signal_number: int, frame: FrameType | None) -> None:
        stopped.set()
        query.stop()

    signal.signal(signal.SIGTERM, stop)
    if parent is not None:
        threading.Thread(target=_stop_with, args=(parent, query, stopped), daemon=True).start()
    query.awaitTermination()


def _started() -> Any:
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
    copies = environment.get("B_WORKLOAD", "w1") == "w1"
    df = _copied(flow) if copies else _balances(flow, state)
    options: dict[str, Any] = {"partitioner": "source"} if copies else {}
    if engine := environment.get("B_ENGINE"):
        options["engine"] = engine
    return flow.write(
        df,
        topic=environment["B_OUT"],
        trigger=f"{environment['B_COMMIT_MS']} milliseconds",
        guarantee=_GUARANTEES[environment.get("B_GUARANTEE", "eos")],
        **options,
    ).start()


def _copied(flow: Flow) -> Any:
    return flow.read(os.environ["B_IN"]).select("key", "value")


def _balances(flow: Flow, state: Path) -> Any:
    most = int(os.environ.get("B_RECORDS_PER_BATCH", _RECORDS_PER_BATCH))
    processor = ColumnBalance() if os.environ.get("B_VARIANT", "records") == "columns" else Balance()
    df = flow.read(os.environ["B_IN"], max_records_per_batch=most)
    return flow.process(df, processor, table=f"{flow.name}-table", state_dir=state / "tables")


def _stop_with(parent: int, query: Any, stopped: threading.Event) -> None:
    while not stopped.wait(_PARENT_S):
        if os.getppid() != parent:
            query.stop()
            return


if __name__ == "__main__":
    main()
