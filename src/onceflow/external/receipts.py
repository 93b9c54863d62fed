"""Rows that a task has found to be refused, in its receipt: the driver makes dead letters of them."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from onceflow.external.sink import RefusedRow

#: Number of a row, and why it is refused: the class of the error, and its text.
Refused = tuple[int, str, str]

_KIND, _TEXT = "onceflow refused kind", "onceflow refused text"


def with_reasons(batch: pa.RecordBatch, refused: Sequence[Refused]) -> pa.Table:
    """These rows of a batch, and why they are refused."""
    rows = pa.Table.from_batches([batch.take(pa.array([number for number, _, _ in refused]))])
    rows = rows.append_column(_KIND, pa.array([kind for _, kind, _ in refused]))
    return rows.append_column(_TEXT, pa.array([text for _, _, text in refused]))


def packed(refused: Sequence[pa.Table]) -> str:
    """What `with_reasons` has made, as a text; "": nothing."""
    if not refused:
        return ""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, refused[0].schema) as stream:
        for rows in refused:
            stream.write_table(rows)
    return base64.b64encode(out.getvalue().to_pybytes()).decode()


def unpacked(text: str) -> Iterator[pa.Table]:
    """What `packed` has got."""
    if text:
        with pa.ipc.open_stream(base64.b64decode(text)) as stream:
            yield stream.read_all()


def refused_rows(refused: pa.Table, record: Collection[str]) -> Iterator[RefusedRow]:
    """The rows that `with_reasons` has made.

    Args:
        record: columns of the Kafka records.
    """
    columns = {name: _python_values(refused.column(name)) for name in refused.schema.names}
    for number in range(refused.num_rows):
        row = {name: values[number] for name, values in columns.items()}
        kind, text = row.pop(_KIND), row.pop(_TEXT)
        yield RefusedRow(row, kind, text, {name: row.pop(name) for name in record if name in columns})


def _python_values(column: Any) -> list[Any]:
    """As Python objects. A text that is no UTF-8 is bytes, and what Python has no value for is a text."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(value) for value in column]


def _python_value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.cast(pa.binary()).as_py() if pa.types.is_string(value.type) else repr(value.type)
    except (ValueError, OverflowError):
        return str(value.cast(pa.string()))
