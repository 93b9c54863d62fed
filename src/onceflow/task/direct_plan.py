"""What the direct engine does with records: how the rows of each source topic become the rows of a query.

The rows of a source are Arrow batches with the columns of Spark's Kafka source (`SOURCE_TYPES`). A plan selects,
renames and casts columns, adds constant ones, and calls functions of the flow (``Flow.map``). The module
``planning/direct_query.py`` reads such a plan from Spark's.

The driver applies a plan to what it has fetched, and tasks to what they read by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa

from onceflow.state.engine import input_batch

#: The Arrow type of each column of Spark's Kafka source, in its order. Only a read with headers has the last one.
SOURCE_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
_HEADERS = "headers"

#: As ``mapInArrow`` takes it.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Columns in the order of an operator. None: nothing uses it, so it was not built.
_Arrays = Sequence[pa.Array | None]


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

    def array(self, columns: _Arrays, rows: int) -> pa.Array | None:
        column = columns[self.at]
        return column if column is None or self.cast is None else reinterpreted(column, self.cast)


@dataclass(frozen=True)
class Constant:
    """A column with the same value in all rows."""

    name: str
    value: str | bytes | int | None
    type: pa.DataType

    def array(self, columns: _Arrays, rows: int) -> pa.Array:
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

    def apply(self, columns: _Arrays, rows: int) -> Iterator[tuple[_Arrays, int]]:
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

    def apply(self, columns: _Arrays, rows: int) -> Iterator[tuple[_Arrays, int]]:
        made = self.function(_batch(columns, self.input, rows))
        yield [_plain(column) for column in made.columns], made.num_rows


class Program(Protocol):
    """Operators of Spark, applied to rows that the driver has (``spark/row_program.py``, ``spark/row_job.py``)."""

    @property
    def needed(self) -> frozenset[int]:
        """The places of the input columns that are looked at, or passed on in each row."""
        ...

    @property
    def job(self) -> str:
        """Why it is a Spark job, such as ``BroadcastHashJoin``; empty: it is none."""
        ...

    def rows(self, columns: _Arrays, count: int) -> Iterator[tuple[list[pa.Array], int]]:
        """The rows that become of these, as columns, and how many they are. Columns that are not needed may be None.
        Many rows come in several parts."""
        ...


@dataclass(frozen=True)
class SparkRows:
    """Filters, computed columns and the like, which Spark itself evaluates. Only the driver can apply them.

    Args:
        names: of the columns that come out.
    """

    names: tuple[str, ...]
    program: Program

    def used(self, wanted: frozenset[int]) -> frozenset[int]:
        """The places of the input columns that they need, whatever is wanted of the result."""
        return self.program.needed

    def apply(self, columns: _Arrays, rows: int) -> Iterator[tuple[_Arrays, int]]:
        for made, count in self.program.rows(columns, rows):
            yield [_plain(column) for column in made], count


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

    def apply(self, columns: _Arrays, rows: int) -> Iterator[tuple[_Arrays, int]]:
        for made in self.function(iter([_batch(columns, self.input, rows)])):
            yield [_plain(made.column(name)) for name in self.names], made.num_rows


Operator = Select | MapRows | SparkRows | ArrowRows


@dataclass(frozen=True)
class DirectSource:
    """One topic of a plan, and what is done with its rows.

    Args:
        include_headers, fail_on_data_loss: as given to ``Flow.read``.
        max_records: most records of the topic in one batch; None: any number.
        operators: the first one takes the columns of the source.
    """

    topic: str
    include_headers: bool
    fail_on_data_loss: bool
    max_records: int | None
    operators: tuple[Operator, ...] = ()

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns of the source itself."""
        return tuple(name for name in SOURCE_TYPES if name != _HEADERS or self.include_headers)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that come out."""
        return self.operators[-1].names if self.operators else self.source_columns

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """The columns of the source that are used. The others need not be built."""
        wanted = frozenset(range(len(self.columns)))
        for operator in reversed(self.operators):
            wanted = operator.used(wanted)
        return tuple(name for at, name in enumerate(self.source_columns) if at in wanted)

    def then(self, operator: Operator) -> DirectSource:
        """The same with one more operator."""
        return replace(self, operators=(*self.operators, operator))

    def read_with(self, other: DirectSource) -> DirectSource:
        """How the topic is read for both: the source without operators."""
        limits = [each.max_records for each in (self, other) if each.max_records is not None]
        return replace(
            self,
            include_headers=self.include_headers or other.include_headers,
            fail_on_data_loss=self.fail_on_data_loss or other.fail_on_data_loss,
            max_records=min(limits, default=None),
            operators=(),
        )

    def apply(self, records: Mapping[str, pa.Array], count: int) -> Iterator[pa.RecordBatch]:
        """The rows of the query that these records become, mostly in one batch.

        Args:
            records: columns of the topic's records, at least those of ``needed``, each with its type of `SOURCE_TYPES`.
                There may be none: a query of constants makes a row of each record.
            count: how many records there are.

        Raises:
            OnceflowError: a function of ``Flow.map`` has failed, or has returned something else than its schema says.
            PySparkException: an operator of Spark fails for a row.
        """
        wanted = set(self.needed)
        columns = [records[name] if name in wanted else None for name in self.source_columns]
        for made, rows in _through(self.operators, columns, count):
            yield _batch(made, self.columns, rows)


@dataclass(frozen=True)
class StepSource:
    """A process step, and what is done with its rows.

    Args:
        table: of the step. Only the driver knows how to run it, see ``driver/step_chain.py``.
        input: the rows that go into it.
        names: of the columns of its rows that operators after it use, or the sink.
    """

    table: str
    input: DirectPlan
    names: tuple[str, ...]
    operators: tuple[Operator, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that come out."""
        return self.operators[-1].names if self.operators else self.names

    def then(self, operator: Operator) -> StepSource:
        """The same with one more operator."""
        return replace(self, operators=(*self.operators, operator))

    def apply(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of the query that rows of the step become."""
        columns = [rows.column(name) for name in self.names]
        for made, count in _through(self.operators, columns, rows.num_rows):
            yield _batch(made, self.columns, count)


Source = DirectSource | StepSource


def _through(operators: Sequence[Operator], columns: _Arrays, count: int) -> Iterator[tuple[_Arrays, int]]:
    if not operators:
        yield columns, count
        return
    first, *others = operators
    for made, rows in first.apply(columns, count):
        yield from _through(others, made, rows)


@dataclass(frozen=True)
class DirectPlan:
    """How the rows of each source topic, and of each process step, become the rows of a query.

    Args:
        sources: several may be of one topic: its records become rows of each.
        columns: names of the columns of the query.
        steps: process steps whose rows are rows of the query, maybe behind operators. A step that only writes what it
            yields is none of them: then the plan is that of its input.
    """

    sources: tuple[DirectSource, ...]
    columns: tuple[str, ...]
    steps: tuple[StepSource, ...] = ()

    @cached_property
    def by_spark(self) -> bool:
        """Whether it has operators that only Spark can apply, in the driver's JVM or in a job."""
        return any(True for _ in self._programs())

    @cached_property
    def needs_frame(self) -> bool:
        """Whether tasks that read need a DataFrame of Spark: for Spark's operators, and to move rows to steps behind
        operators or to the functions of ``Flow.join_table`` and ``Flow.enrich``."""
        functions = any(isinstance(each, ArrowRows) for source in self.sources for each in source.operators)
        return self.by_spark or functions or bool(self.steps)

    @cached_property
    def job(self) -> str:
        """Why each batch has a Spark job of its own; empty: none is needed."""
        return next((program.job for program in self._programs() if program.job), "")

    def _programs(self) -> Iterator[Program]:
        every: tuple[Source, ...] = (*self.sources, *self.steps)
        for source in every:
            yield from (each.program for each in source.operators if isinstance(each, SparkRows))
        for step in self.steps:
            yield from step.input._programs()

    @cached_property
    def reads(self) -> dict[str, DirectSource]:
        """How each topic is read."""
        found: dict[str, DirectSource] = {}
        for source in (*self.sources, *(each for step in self.steps for each in step.input.reads.values())):
            found[source.topic] = found.get(source.topic, source).read_with(source)
        return found

    def needed(self, topic: str) -> tuple[str, ...]:
        """The columns of a topic that are used, not counting inputs of steps. The others need not be built."""
        used = {name for source in self.sources if source.topic == topic for name in source.needed}
        return tuple(name for name in SOURCE_TYPES if name in used)

    def rows(self, topic: str, records: Mapping[str, pa.Array], count: int) -> Iterator[pa.RecordBatch]:
        """The rows of the query that records of a topic become, without those of steps. Arguments and errors as of
        `DirectSource.apply`."""
        for source in self.sources:
            if source.topic == topic:
                yield from source.apply(records, count)

    def only(self, names: Sequence[str]) -> DirectPlan:
        """The plan with these columns of it only, in this order: then less is needed of the sources.

        Args:
            names: of columns whose names are unique.
        """
        if tuple(names) == self.columns:
            return self
        select = Select(tuple(Attribute(name, self.columns.index(name)) for name in names))
        return DirectPlan(
            tuple(source.then(select) for source in self.sources),
            tuple(names),
            tuple(step.then(select) for step in self.steps),
        )


@dataclass(frozen=True)
class SinkForm:
    """What the sink takes of the rows of a query: the same as ``ownership.prepare`` selects with Spark. In contrast to
    ``ownership.Columns``, tasks can load it fast.

    Args:
        taken: the columns, which have been checked. cast: those of them that are strings and become binary.
        by_source: whether rows stay in the partition that they were read from (``partitioner="source"``).
    """

    taken: tuple[str, ...]
    cast: tuple[str, ...]
    by_source: bool = False

    def rows(self, rows: pa.RecordBatch, source_partition: int) -> pa.RecordBatch:
        """The rows as the sink takes them.

        Args:
            rows: what a plan makes of records of this partition of a source.

        Returns:
            The columns of ``taken``: key and value are binary, the timestamp is epoch milliseconds. If rows stay in
            their partition, the column ``partition`` has its number.
        """
        made: dict[str, Any] = {}
        for name in self.taken:
            column = rows.column(name)
            if name in self.cast:
                column = reinterpreted(column, "binary")
            elif name == "timestamp":
                column = input_batch.milliseconds(column)
            made[name] = column
        if self.by_source:
            made["partition"] = pa.repeat(pa.scalar(source_partition, pa.int32()), rows.num_rows)
        return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))


@dataclass(frozen=True)
class TableForm:
    """What an external sink takes of the rows of a query: all columns, with the types that Spark's tasks give them.

    Args:
        schema: the columns.
    """

    schema: pa.Schema
    by_source = False

    def rows(self, rows: pa.RecordBatch, source_partition: int) -> pa.RecordBatch:
        """The rows as the sink takes them. ``source_partition`` is not used."""
        pairs = zip(rows.columns, self.schema.types, strict=True)
        made = [column if column.type == kind else column.cast(kind) for column, kind in pairs]
        return pa.RecordBatch.from_arrays(made, schema=self.schema)


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with fields that may all be null, also those inside of others."""
    return pa.schema([pa.field(field.name, _made_anew(field.type, lambda kind: kind)) for field in schema])


_KINDS: dict[type, str] = {
    Select: "select",
    MapRows: "map to",
    SparkRows: "Spark's operators, to",
    ArrowRows: "function to",
}


def described(plan: DirectPlan, *, extended: bool = False) -> str:
    """The plan as text, a line for each topic.

    Args:
        extended: also which columns are fetched.
    """
    return "\n".join(["== Direct plan ==", *_lines(plan, extended=extended)])


def _lines(plan: DirectPlan, *, extended: bool) -> Iterator[str]:
    for source in plan.sources:
        yield " -> ".join([f"topic {source.topic}", *map(_described, source.operators)])
        if extended:
            yield f"  columns of the topic that are used: {', '.join(source.needed)}"
    for step in plan.steps:
        yield " -> ".join([f"process step of table {step.table}", *map(_described, step.operators)])
        yield from (f"  {line}" for line in _lines(step.input, extended=extended))


def _described(operator: Operator) -> str:
    return f"{_KINDS[type(operator)]} {', '.join(operator.names)}"


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


def _plain(column: pa.Array) -> pa.Array:
    """A column of a function with the type that it has without one: Spark's settings give times the time zone of the
    session, and large types to texts. Rows of several topics go into one stream, so their types must be the same."""
    kind = _plain_type(column.type)
    return column if kind == column.type else column.cast(kind)


def _plain_type(kind: Any) -> Any:
    return _made_anew(kind, _plain_leaf)


def _plain_leaf(kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else SOURCE_TYPES["timestamp"]
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def _made_anew(kind: Any, leaf: Callable[[Any], Any]) -> Any:
    """The type with others in place of those that contain none, and with fields that may be null."""
    if pa.types.is_list(kind):
        return pa.list_(_made_anew(kind.value_type, leaf))
    if pa.types.is_map(kind):
        return pa.map_(_made_anew(kind.key_type, leaf), _made_anew(kind.item_type, leaf))
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, _made_anew(field.type, leaf)) for field in fields])
    return leaf(kind)


def _batch(columns: _Arrays, names: Sequence[str], rows: int) -> pa.RecordBatch:
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(list(columns), names=list(names))
