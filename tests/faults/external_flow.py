"""A flow that writes to a database (SQLite, or PostgreSQL by a DSN) or a Delta table, for crash tests.

``drivers.py`` starts it in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

import onceflow

sys.path.append(str(Path(__file__).parents[2] / "examples" / "own-sink"))

from sqlite_sink import SqliteSink


class LosesAnswers(SqliteSink):
    """The first commits of an instance fail, before or after they took effect; nobody is told which."""

    def __init__(self, *arguments: Any, applied: bool, times: int = 2) -> None:
        super().__init__(*arguments)
        self.applied, self.left = applied, times

    def commit(self, attempt: Any, receipts: Any, progress: str) -> None:
        self.left -= 1
        if self.left < 0 or self.applied:
            super().commit(attempt, receipts, progress)
        if self.left >= 0:
            raise ConnectionError("the connection was lost")


def sink_of(target: str, storage: dict[str, str] | None = None) -> onceflow.ExternalSink:
    """A database file, a table by a DSN, or a Delta table."""
    if target.endswith(".delta"):
        return onceflow.DeltaSink(target, storage_options=storage)
    if target.startswith("postgresql:"):
        return onceflow.PostgresSink(target, "ledger")
    return SqliteSink(target, "ledger")


def start(given: dict[str, Any], spark: Any) -> Any:
    """Start the flow. The column ``attempt`` is another one whenever a batch is run again."""
    flow = onceflow.Flow(given["flow"], spark, bootstrap_servers=given["bootstrap"], **given.get("open", {}))
    try:
        source = flow.read(given["source"], max_records_per_batch=given.get("records_per_batch", 500))
        rows = source.selectExpr("topic", "partition", "offset", "string(value) AS value", "uuid() AS attempt")
        sink = given.get("sink") or sink_of(given["database"], given.get("storage"))
        return flow.write_external(rows, sink, **given.get("write", {})).start()
    except BaseException:
        flow.close()
        raise


def use() -> None:
    """Make tasks get the classes of this module, and of the sink, with their code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cloudpickle.register_pickle_by_value(sys.modules[SqliteSink.__module__])
