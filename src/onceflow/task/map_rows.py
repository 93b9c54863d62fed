"""``Flow.map``: a function of the user's over Arrow batches, in tasks of Spark and in the direct engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import OnceflowError, ProcessorError, SchemaError, counted
from onceflow.spark import function_names
from onceflow.spark.pickling import Pickled
from onceflow.state.api import user_errors
from onceflow.state.api.dictionaries import decoded
from onceflow.state.api.whole_numbers import NEXT_STEP, cast, changed, rounded, with_nullable_integers

_UTC_TIMES = pa.timestamp("us", tz="UTC")
# Types of one kind are cast to each other where no value changes.
_KINDS: tuple[tuple[Callable[[Any], bool], ...], ...] = (
    (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    ),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is None,),
    (pa.types.is_date,),
    (pa.types.is_duration,),
    (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view),
    (pa.types.is_struct,),
    (pa.types.is_map,),
)


class Sent:
    """A function as it was when it was given to ``Flow.map``: its pickle. Driver and tasks load that one, so variables
    that the function uses may change later. When the driver has called it, they may also have values that cannot be
    pickled, or that are large.

    Args:
        pickled: see ``spark/pickling.py``.
    """

    def __init__(self, pickled: Pickled) -> None:
        self.pickled = pickled
        self._loaded: Callable[[pa.RecordBatch], Any] | None = None

    def __call__(self, batch: pa.RecordBatch) -> Any:
        if self._loaded is None:
            self._loaded = self.pickled.load()
        return self._loaded(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        for broadcast in self.pickled.broadcasts:
            broadcast.__reduce__()
        return pickle.loads, (self.pickled.data,)


class RowsMap:
    """The function given to ``mapInArrow``. The direct engine calls `apply` itself.

    Args:
        function: the user's.
        name: what the user calls it.
        number: of the function in its flow.
        schema: of the batches that come out.
    """

    def __init__(self, function: Callable[[pa.RecordBatch], Any], name: str, number: int, schema: pa.Schema, flow: str):
        self.function = function
        self.name = name
        self.schema = schema
        self.flow = flow
        self.__name__ = function_names.map_name(number, name)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield self.apply(batch)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """What the function makes of a batch.

        Raises:
            ProcessorError: the function has failed.
            SchemaError: it has returned something else than the schema says.
        """
        if not batch.num_rows:
            return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in self.schema.types], schema=self.schema)
        given = with_nullable_integers(_in_utc(batch))
        try:
            result = self.function(given)
        except OnceflowError as error:
            raise error.locate(flow=self.flow) from error.__cause__
        except Exception as error:
            raise ProcessorError(
                f"Flow.map: {self.name} failed for a batch of {counted(batch.num_rows, 'row')}: "
                f"{user_errors.full_text_of(error)}",
                flow=self.flow,
                topic=_topic(given),
                detail="; ".join(filter(None, [_read_from(given), user_errors.line_of(error)])),
                next_step="correct the function; it gets a pyarrow.RecordBatch and returns one. Leave out records that "
                "it cannot take, or use Flow.process, whose dead_letter_topic= takes them",
            ) from error
        return self._checked(result, given)

    def _checked(self, result: Any, given: pa.RecordBatch) -> pa.RecordBatch:
        if not isinstance(result, pa.RecordBatch | pa.Table):
            raise self._wrong(
                f"returned {type(result).__name__}, not a pyarrow.RecordBatch",
                given,
                "return a batch; batch.slice(0, 0) has no rows",
            )
        names = result.schema.names
        for name in self.schema.names:
            if names.count(name) != 1:
                problem = "without the column" if name not in names else "with several columns"
                has = f"; it has {', '.join(map(repr, names))}" if name not in names else ""
                raise self._wrong(f"returned a batch {problem} {name!r}{has}", given, self._columns())
        extra = [name for name in names if name not in self.schema.names]
        if extra:
            raise self._wrong(f"returned a batch with the further column {extra[0]!r}", given, self._columns())
        if isinstance(result, pa.Table):
            result = result.combine_chunks()
        columns = [self._cast(_array(result.column(field.name)), field, given) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _cast(self, column: pa.Array, field: pa.Field, given: pa.RecordBatch) -> pa.Array:
        kind = column.type
        if kind == field.type:
            return column
        column = decoded(column)
        inner = column.type
        if pa.types.is_null(inner) or any(
            any(is_type(inner) for is_type in types) and any(is_type(field.type) for is_type in types)
            for types in _KINDS
        ):
            unknown = _other_fields(inner, field.type)
            if unknown:
                raise self._wrong(
                    f"returned the column {field.name!r} with the fields {unknown}", given, self._columns()
                )
            large = rounded(column, field.type)
            if large is not None:
                raise self._wrong(
                    f"returned the column {field.name!r} as {kind}, which cannot become {field.type}: {large!r} may be "
                    "another number, rounded",
                    given,
                    NEXT_STEP,
                )
            other = changed(column, field.type)
            if other is not None:
                raise self._wrong(
                    f"returned the column {field.name!r} as {kind}, which cannot become {field.type}: {other!r} would "
                    "be another number",
                    given,
                    f"round it as it should be rounded, or {self._columns()}",
                )
            try:
                return cast(column, field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                why = f" ({str(error).splitlines()[0]:.200})"
        else:
            why = ""
        raise self._wrong(
            f"returned the column {field.name!r} as {kind}, which cannot become {field.type}{why}",
            given,
            self._columns(),
        )

    def _columns(self) -> str:
        wanted = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return f"return these columns, or give Flow.map another schema=: {wanted}"

    def _wrong(self, what: str, given: pa.RecordBatch, next_step: str) -> SchemaError:
        return SchemaError(
            f"Flow.map: {self.name} {what}",
            flow=self.flow,
            topic=_topic(given),
            detail=_read_from(given) or f"it was given {counted(given.num_rows, 'row')}",
            next_step=next_step,
        )


def _other_fields(kind: Any, wanted: Any) -> str:
    """The fields of a struct that has others than it should have, at any depth; empty: there is none. A cast would
    fill those that are missing with nulls, and drop the others."""
    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        names = [kind.field(at).name for at in range(kind.num_fields)]
        if sorted(names) != sorted(wanted.field(at).name for at in range(wanted.num_fields)):
            return ", ".join(names)
        inner = [(kind.field(name).type, wanted.field(name).type) for name in names]
    elif pa.types.is_map(kind) and pa.types.is_map(wanted):
        inner = [(kind.key_type, wanted.key_type), (kind.item_type, wanted.item_type)]
    elif hasattr(kind, "value_type") and hasattr(wanted, "value_type"):
        inner = [(kind.value_type, wanted.value_type)]
    else:
        inner = []
    return next(filter(None, (_other_fields(*pair) for pair in inner)), "")


def _in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with times in UTC. Spark gives them the time zone of its session; the moments are the same."""
    for at, field in enumerate(batch.schema):
        kind = _utc_type(field.type)
        if kind != field.type:
            batch = batch.set_column(at, field.name, batch.column(at).cast(kind))
    return batch


def _utc_type(kind: Any) -> Any:
    """The type with UTC in place of other time zones, at any depth."""
    if pa.types.is_timestamp(kind):
        return kind if kind.tz in (None, "UTC") else _UTC_TIMES
    if pa.types.is_map(kind):
        return pa.map_(_utc_type(kind.key_type), _utc_type(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([field.with_type(_utc_type(field.type)) for field in fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_utc_type(kind.value_type)))
    return kind


def _array(column: Any) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _topic(batch: pa.RecordBatch) -> str | None:
    """The topic that all rows were read from, if they say so. Rows for a topic have no offset."""
    if not {"topic", "offset"} <= set(batch.schema.names):
        return None
    topics = pc.unique(batch.column("topic"))
    topic = topics[0].as_py() if len(topics) == 1 else None
    return topic if isinstance(topic, str) else None


def _read_from(batch: pa.RecordBatch) -> str:
    """Where the rows were read, as text; empty if they do not say so."""
    if not {"partition", "offset"} <= set(batch.schema.names):
        return ""
    partition, offset = batch.column("partition"), batch.column("offset")
    if not (pa.types.is_integer(partition.type) and pa.types.is_integer(offset.type)):
        return ""
    low, high = pc.min_max(offset).as_py().values()
    numbers = sorted(number for number in pc.unique(partition).to_pylist() if number is not None)
    return f"rows of partition {', '.join(map(str, numbers))}, offsets {low} to {high}"
