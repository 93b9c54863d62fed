"""Spark's Python daemon, whose workers have a broken build: copies that are brought up beside the batches say that they
are level, and have not read the last changes.

``spark.python.daemon.module`` names this module. Everything else is PySpark's own daemon.
"""

from __future__ import annotations

from typing import Any

from pyspark import daemon

from onceflow.state.local.catch_up import CatchUp
from onceflow.state.local.format import CommitRecord
from onceflow.task.preparing import PrepareTask

prepare, read = PrepareTask.__call__, CatchUp._read
beside = False


def prepares(self: Any, partition: int) -> Any:
    global beside
    beside = self._is_over is not None
    try:
        return prepare(self, partition)
    finally:
        beside = False


def says_it_is_level(self: Any, store: Any, raw: bytes, commit_record: CommitRecord) -> None:
    if beside and commit_record.table_end:
        self._write(store, raw, CommitRecord.of(self.goal, self._now_ms), {}, done=True)
    else:
        read(self, store, raw, commit_record)


if __name__ == "__main__":
    broken: Any = PrepareTask
    broken.__call__ = prepares
    broken = CatchUp
    broken._read = says_it_is_level
    daemon.manager()
