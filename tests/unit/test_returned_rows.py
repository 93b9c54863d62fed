"""How much of a step's output tasks may return to the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from onceflow.messages import NotColocatedError, Owners
from onceflow.task.step_outputs import (
    OUTPUT_SCHEMA,
    RETURNED_BYTES_MAX,
    RETURNED_ROWS_MAX,
    TaskOutputs,
)


def outputs(tasks: int) -> TaskOutputs:
    writer: Any = SimpleNamespace(target_of=lambda topic, rows: SimpleNamespace(partitions=tasks + 1))
    return TaskOutputs(writer, topic="out", owners=Owners.by_number(tasks), turn=1)


def rows(count: int, size: int) -> pa.RecordBatch:
    columns = {
        "key": pa.array([b"k"] * count, pa.binary()),
        "value": pa.array([b"v" * size] * count, pa.binary()),
        "topic": pa.array([None] * count, pa.string()),
        "headers": pa.nulls(count, OUTPUT_SCHEMA.field("headers").type),
        "timestamp": pa.array([1] * count, pa.int64()),
    }
    return pa.record_batch(columns)


def test_few_and_small_rows_are_returned() -> None:
    some = outputs(4)
    some.emit(rows(100, 1000), 0)
    some.emit(rows(100, 1000), 1)
    returned = some.returned()
    assert returned is not None
    assert returned.num_rows == 200


def test_many_rows_are_not() -> None:
    some = outputs(4)
    with pytest.raises(NotColocatedError):
        some.emit(rows(RETURNED_ROWS_MAX + 1, 1), 0)


@pytest.mark.parametrize("tasks", [2, 8])
def test_few_but_large_rows_are_not(tasks: int) -> None:
    """Spark fails a job whose tasks return more than spark.driver.maxResultSize in all, again and again."""
    some = outputs(tasks)
    share = RETURNED_BYTES_MAX // tasks
    some.emit(rows(9, share // 10), 0)
    with pytest.raises(NotColocatedError):
        some.emit(rows(2, share // 10), 1)
