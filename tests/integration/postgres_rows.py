"""What tests of the PostgreSQL sink share: rows that are written through it, and statements beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pyarrow as pa

from onceflow import PostgresSink
from onceflow.external.sink import BatchAttempt, RefusedRow


def run(dsn: str, *statements: str) -> list[Any]:
    """The rows of the last statement. Times are those of UTC."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET DateStyle = 'ISO, MDY'")
        for statement in statements:
            done = connection.execute(statement)
        return done.fetchall() if done.description else []


def written(sink: PostgresSink, batch: pa.RecordBatch, *, sets_aside: bool = True) -> list[RefusedRow]:
    """Write one batch, in two tasks. Returns the rows that are set aside."""
    with closing(sink):  # an error that is kept would keep its connection: hundreds of tests have one server
        if sets_aside:
            sink.set_aside()
        sink.check(batch.schema)
        attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
        sink.begin(attempt)
        half = batch.num_rows // 2
        receipts = [sink.write(attempt, str(n), iter([part])) for n, part in enumerate((batch[:half], batch[half:]))]
        return committed(sink, attempt, receipts, sets_aside=sets_aside)


def committed(
    sink: PostgresSink, attempt: BatchAttempt, receipts: Sequence[bytes], *, sets_aside: bool = True
) -> list[RefusedRow]:
    """Commit a batch. Returns the rows that are set aside."""
    found: list[RefusedRow] = []

    def progress(rows: Sequence[RefusedRow]) -> str:
        found.extend(rows)
        return "{}"

    if sets_aside:
        sink.commit_accepted(attempt, receipts, progress)
    else:
        sink.commit(attempt, receipts, "{}")
    return found


class Written:
    """A sink, and the batches that are written to it. Rows that are not taken are in ``refused``."""

    def __init__(self, dsn: str, table: str = "t", *, sets_aside: bool = True, **options: Any) -> None:
        self.sink = PostgresSink(dsn, table, **options)
        if sets_aside:
            self.sink.set_aside()
        self.sets_aside = sets_aside
        self.refused: list[RefusedRow] = []
        self._flow = f"{table} {options}"
        self._batch = 0
        self._generation = 0

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
        """One batch."""
        if not self._generation:
            self.sink.check(schema)
            self._generation = self.sink.open(self._flow, "o", None).generation
        self._batch += 1
        attempt = BatchAttempt(self._flow, "o", self._generation, self._batch, 1)
        with closing(self.sink):
            self.sink.begin(attempt)
            receipt = self.sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist([*rows], schema=schema)]))
            self.refused += committed(self.sink, attempt, [receipt], sets_aside=self.sets_aside)
