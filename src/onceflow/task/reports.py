"""What a write task tells the driver: one row per partition it wrote, at least one row in any case.

A report travels as an Arrow row through Spark, so its format is fixed here, on both sides.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from onceflow.errors import OnceflowError
from onceflow.user_code import cut

#: Spark's name of the schema (what ``mapInArrow`` declares) and Arrow's; the same columns.
SPARK_SCHEMA = (
    "task int, attempt int, stage int, topic string, partition int, base_offset long, count long, "
    "nbytes long, rows long, seconds double, rss_kib long, error binary"
)
ARROW_SCHEMA = pa.schema(
    [
        ("task", pa.int32()),
        ("attempt", pa.int32()),
        ("stage", pa.int32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("base_offset", pa.int64()),
        ("count", pa.int64()),
        ("nbytes", pa.int64()),
        ("rows", pa.int64()),
        ("seconds", pa.float64()),
        ("rss_kib", pa.int64()),
        ("error", pa.binary()),
    ]
)

#: Characters of an error's text that go to the driver.
MAX_TEXT = 20_000


@dataclass(frozen=True)
class Report:
    """One row.

    Args:
        task: partition number of the task in its job; -1 when the driver wrote.
        attempt: Spark's attempt number of the task (0: the first).
        stage: Spark's stage id; -1 when the driver wrote.
        topic, partition: what was written; topic is None in a row that only says the task ran.
        base_offset: offset of the first record written to the partition.
        count: records acknowledged there. nbytes: their encoded size.
        rows: rows the task received.
        seconds: how long the task took. rss_kib: peak resident memory of its process.
        error: why the task gave up, instead of a count.
    """

    task: int
    attempt: int
    stage: int
    topic: str | None
    partition: int
    base_offset: int
    count: int
    nbytes: int
    rows: int
    seconds: float
    rss_kib: int
    error: OnceflowError | None = None

    def explained(self, why: str) -> Report:
        """The same report, its error's detail completed."""
        if self.error is None or not why:
            return self
        fields = self.error.fields()
        fields["detail"] = f"{fields['detail']}; {why}" if fields["detail"] else why
        return replace(self, error=type(self.error)(self.error.what, **fields))


def _pickled(error: OnceflowError) -> bytes:
    """With a text of bounded size: that of user code's exceptions may hold all their data, in every task."""
    fields = error.fields()
    fields["detail"] = cut(fields["detail"], MAX_TEXT)
    return pickle.dumps(type(error)(cut(error.what, MAX_TEXT), **fields))


def to_arrow(reports: Iterable[Report]) -> pa.RecordBatch:
    rows = []
    for report in reports:
        row = {**asdict(report), "error": None if report.error is None else _pickled(report.error)}
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=ARROW_SCHEMA)


def from_rows(rows: Iterable[Any]) -> list[Report]:
    """From what ``DataFrame.collect`` returns."""
    return from_dicts(row.asDict() for row in rows)


def from_dicts(rows: Iterable[dict[str, Any]]) -> list[Report]:
    """From rows taken apart."""
    out = []
    for fields in rows:
        error = fields.pop("error")
        out.append(Report(**fields, error=None if error is None else pickle.loads(error)))
    return out
