"""What is done with rows: columns are selected, renamed, cast and added, and functions of the flow are called.

The rows of a source are Arrow batches with the columns of Spark's Kafka source (`SOURCE_TYPES`). The same operators run
in the driver, on what it has fetched, and in tasks, on what they read by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from onceflow.arrow_types import made_anew
from onceflow.protocol.headers import HEADERS

#: The Arrow type of each column of Spark's Kafka source, in its order. Only a read with headers has the last one.
SOURCE_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": HEADERS,
}

#: As ``mapInArrow`` takes it.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Columns in the order of an operator. None: nothing uses it, so it was not built.
Arrays = Sequence[pa.Array | None]


class RowOperator(Protocol):
    """One step from rows to rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that come out."""
        ...

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns that are needed for these columns of the result."""
        ...

    def apply(self, columns: Arrays, rows: int) -> Iterator[tuple[Arrays, int]]:
        """The columns and the number of rows that come out, maybe in several parts."""
        ...


@dataclass(frozen=True)
class Attribute:
    """A column of the input.

    Args:
        name: its name after the operator.
        at: its place in the input.
        cast: ``string`` or ``binary``: its bytes are taken as that type; None: it keeps its type.
    """

    name: str
    at: int
    cast: str | None = None

    def array(self, columns: Arrays, rows: int) -> pa.Array | None:
        column = columns[self.at]
        return column if column is None or self.cast is None else reinterpreted(column, self.cast)


@dataclass(frozen=True)
class Constant:
    """A column with the same value in all rows."""

    name: str
    value: str | bytes | int | None
    type: pa.DataType

    def array(self, columns: Arrays, rows: int) -> pa.Array:
        return pa.nulls(rows, self.type) if self.value is None else pa.repeat(pa.scalar(self.value, self.type), rows)


@dataclass(frozen=True)
class Select:
    """A projection.

    Args:
        columns: what comes out, in its order.
    """

    columns: tuple[Attribute | Constant, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that come out."""
        return tuple(column.name for column in self.columns)

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns from which these columns are made."""
        taken = (self.columns[at] for at in wanted)
        return frozenset(column.at for column in taken if isinstance(column, Attribute))

    def apply(self, columns: Arrays, rows: int) -> Iterator[tuple[Arrays, int]]:
        yield [column.array(columns, rows) for column in self.columns], rows


@dataclass(frozen=True)
class MapRows:
    """A function of ``Flow.map``.

    Args:
        input: names of the columns that it takes.
        names: names of the columns that come out.
        function: takes and returns a batch with these columns; see ``task/map_rows.py``.
    """

    input: tuple[str, ...]
    names: tuple[str, ...]
    function: Callable[[pa.RecordBatch], pa.RecordBatch]

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns that it needs: all, whatever is wanted of its result."""
        return frozenset(range(len(self.input)))

    def apply(self, columns: Arrays, rows: int) -> Iterator[tuple[Arrays, int]]:
        made = self.function(batch_of(columns, self.input, rows))
        yield [plain(column) for column in made.columns], made.num_rows


@dataclass(frozen=True)
class ArrowRows:
    """A function over a stream of Arrow batches, of ``Flow.join_table`` or ``Flow.enrich``.

    Args:
        input: names of the columns that it takes.
        names: names of the columns that come out.
    """

    input: tuple[str, ...]
    names: tuple[str, ...]
    function: ArrowFunction

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns that it needs: all, whatever is wanted of its result."""
        return frozenset(range(len(self.input)))

    def apply(self, columns: Arrays, rows: int) -> Iterator[tuple[Arrays, int]]:
        for made in self.function(iter([batch_of(columns, self.input, rows)])):
            yield [plain(made.column(name)) for name in self.names], made.num_rows


def through(operators: Sequence[RowOperator], columns: Arrays, count: int) -> Iterator[tuple[Arrays, int]]:
    """What these operators, one after the other, make of rows."""
    if not operators:
        yield columns, count
        return
    first, *others = operators
    for made, rows in first.apply(columns, count):
        yield from through(others, made, rows)


def reinterpreted(column: pa.Array, kind: str) -> pa.Array:
    """The same bytes as ``string`` or ``binary``, without a copy.

    Like Spark's cast it does not look whether bytes are text, so that what is cast there and back stays the same.
    """
    wanted = pa.string() if kind == "string" else pa.binary()
    if column.type == wanted:
        return column
    if column.type not in (pa.string(), pa.binary()):
        raise TypeError(f"a column of type {column.type} cannot be taken as {kind}")
    return pa.Array.from_buffers(wanted, len(column), column.buffers(), offset=column.offset)


def plain(column: pa.Array) -> pa.Array:
    """A column of a function with the type that it has without one: Spark's settings give times the time zone of the
    session, and large types to texts. Rows of several topics go into one stream, so their types must be the same."""
    kind = _plain_type(column.type)
    return column if kind == column.type else column.cast(kind)


def _plain_type(kind: Any) -> Any:
    return made_anew(kind, _plain_leaf)


def _plain_leaf(kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else SOURCE_TYPES["timestamp"]
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def batch_of(columns: Arrays, names: Sequence[str], rows: int) -> pa.RecordBatch:
    """Columns as a batch."""
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(list(columns), names=list(names))
