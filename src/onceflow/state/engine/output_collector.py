"""Output records of an engine: checked and encoded one by one or as tables, and returned as Arrow batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.clock import clock_ms
from onceflow.errors import BadRecordError, SchemaError
from onceflow.protocol import timestamps
from onceflow.protocol.headers import HEADERS, Header
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.output_limits import ANYTHING, UNLIMITED, WriteLimits
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES
from onceflow.state.api.user_errors import not_encoded
from onceflow.state.engine.dead_letters import fitted
from onceflow.state.engine.input_batch import binary, milliseconds

_NO_TOPICS = OwnTopics()
_TAKEN_BYTES = 1 << 30
#: Topic, headers and timestamp of a record.
_Extras = tuple[str | None, list[Header], int | None]

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", HEADERS),
        ("timestamp", pa.int64()),
    ]
)
"""Schema of outputs. Topic null: the default output topic. Timestamp in epoch milliseconds; null: the time of
writing."""


class NotRecordsError(TypeError):
    """A processor has yielded something other than records. No input record has caused this error."""


class NotTablesError(ValueError):
    """A column processor has returned something other than the tables that it has to. No input record has caused
    this error."""


class ColumnTypeError(ValueError):
    """A column that a column processor has returned is of a type that cannot be used. Types follow from values, so a
    record may have caused it; or the code, and then no record gets through."""


class OutputCollector:
    """The records that a batch has to write so far.

    Args:
        key, output: serdes of keys and values that are not bytes.
        own_topics: topics that no record may name.
        schema: of the batches that are added, which has `SCHEMA` and maybe more columns.
        limits: what may be written.
        shortened_topics: topics of letters that the processor itself writes, which are shortened if they are too large.
    """

    def __init__(
        self,
        key: Any = BYTES,
        output: Any = BYTES,
        own_topics: OwnTopics = _NO_TOPICS,
        schema: pa.Schema = SCHEMA,
        limits: WriteLimits = ANYTHING,
        shortened_topics: Collection[str] = (),
    ) -> None:
        self._shortened_topics = shortened_topics
        self._limits_of = limits.of
        default = limits.of(None)
        # Records without extras whose key and value have no more bytes than this need no closer look.
        self._small = UNLIMITED if default is None else default.small_bytes
        self._keyless = default is None or not default.compacted  # whether records may have no key
        self._schema = schema
        self._own_topics = own_topics
        self._key_serde = key
        self._output_serde = output
        self._encode_key = key.encode
        self._encode_value = output.encode
        # Only a serde that changes bytes has it, such as a claim check.
        self._encode_bytes = getattr(output, "encode_bytes", None)
        # The header with the id of a schema, and what belongs there in place of the front of values; None: nothing.
        self._id: Header | None = None
        self._moves_id = getattr(output, "ids_in_headers", False)
        if hasattr(output, "id_header"):
            self._id = output.id_header, output.head() if self._moves_id else None
        if self._moves_id:
            length = len(output.head())
            self._encode_value = lambda value: output.encode(value)[length:]
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        # Topic, headers and timestamp by index, because most records have none of them.
        self._extras: dict[int, _Extras] = {}
        self._batches: list[pa.RecordBatch] = []

    def mark(self) -> int:
        """The number of records so far, to `truncate` to. It is not valid after `take`."""
        return len(self._keys)

    def truncate(self, mark: int) -> None:
        """Remove the records that were added since the mark."""
        del self._keys[mark:], self._values[mark:]
        for at in [at for at in self._extras if at >= mark]:
            del self._extras[at]

    def extend(
        self, records: Iterable[Record], key: Any = None, raw_key: bytes | None = None, *, as_read: bool = False
    ) -> None:
        """Add the records that user code has returned.

        Args:
            records: what was returned. If it is a generator, it runs inside this call.
            key: the key that process() or on_timer() was called for.
            raw_key: the bytes of this key. Records with a key of the same value get it in these bytes.
            as_read: values are bytes that were read, and go on unchanged: dead letters and late records.

        Raises:
            TypeError, ValueError: these are not records, or they cannot be written. Errors of a generator or serde are
                raised unchanged.
            BadRecordError: a record names a topic that outputs must not be written to.
        """
        if isinstance(records, Record):
            raise NotRecordsError("expected records, got one Record: yield it, or return a list")
        if not hasattr(records, "__iter__") and not hasattr(records, "__getitem__"):
            raise _no_record(records, records)
        keys, values = self._keys, self._values
        own_key: bytes | None = None  # raw_key as the serde writes it
        small, keyless, moves_id = self._small, self._keyless, self._moves_id
        encode_value, encode_bytes = self._encode_value, None if as_read else self._encode_bytes
        for record in records:
            if type(record) is not Record and not isinstance(record, Record):
                raise _no_record(record, records)
            out_key = record.key if record.key is not None or key is not None else raw_key  # JSON's null is a key
            if out_key is not None and type(out_key) is not bytes:
                if out_key is key and type(key) is str:  # objects of other types may have been changed in place
                    out_key = raw_key
                else:
                    try:
                        out_key = _checked(self._encode_key(out_key), "key")
                        if out_key != raw_key and raw_key is not None:
                            # The same value in other bytes would go to another partition.
                            if own_key is None:
                                own_key = self._encode_key(self._key_serde.decode(raw_key))
                            if out_key == own_key:
                                out_key = raw_key
                    except Exception as error:
                        not_encoded(error, "the key you yielded", record.key, self._key_serde, "key")
                        raise
            value = record.value
            if value is not None and (type(value) is not bytes or encode_bytes is not None):
                try:
                    value = encode_bytes(value) if encode_bytes and type(value) is bytes else encode_value(value)
                    if type(value) is not bytes:
                        _checked(value, "value")
                except Exception as error:
                    not_encoded(error, "the value you yielded", record.value, self._output_serde, "output")
                    raise
            extras = None
            if moves_id or record.topic is not None or record.timestamp_ms is not None or record.headers:
                self._extras[len(keys)] = extras = _extras(record, self._id)
                if extras[0] is not None:
                    self._check(extras[0], record)
            plain = extras is None or (extras[0] is None and not extras[1])
            key_fits = keyless if out_key is None else len(out_key) <= small
            if not (as_read or (plain and key_fits and (value is None or len(value) <= small))):
                out_key, value = self._taken(out_key, value, extras)
            keys.append(out_key)
            values.append(value)

    def _check(self, topic: str, record: Record) -> None:
        why = self._own_topics.refusal(topic)
        if why:
            raise BadRecordError(
                f"A record names the topic {topic!r}, which {why}",
                topic=topic,
                detail=f"yielded with the key {record.key!r:.120}",
                next_step="give outputs topics of their own",
            )

    def _taken(
        self, key: bytes | None, value: bytes | None, extras: _Extras | None
    ) -> tuple[bytes | None, bytes | None]:
        """Key and value of the record that is added next, as its topic takes it. A letter may be shortened.

        Raises:
            BadRecordError: the topic does not take it.
        """
        topic, headers, at_ms = extras or (None, [], None)
        if topic is None or topic not in self._shortened_topics:
            self._check_rules(topic, key, value, headers, at_ms)
            return key, value
        letter = fitted(Record(key, value, topic, headers, at_ms), self._limits_of(topic))
        self._extras[len(self._keys)] = topic, list(letter.headers), at_ms
        return letter.key, letter.value

    def refusal(
        self, topic: str | None, key: bytes | None, value: bytes | None, headers: Iterable[Header], at_ms: int | None
    ) -> str:
        """Why a topic does not take a record, in words; empty: it does, or it is not known."""
        limits = self._limits_of(topic)
        return (
            "" if limits is None else limits.refusal(key, value, limits.headers_as_written(headers, at_ms, clock_ms()))
        )

    def _check_rules(
        self, topic: str | None, key: bytes | None, value: bytes | None, headers: Sequence[Header], at_ms: int | None
    ) -> None:
        why = self.refusal(topic, key, value, headers, at_ms)
        if why:
            limits = self._limits_of(topic)
            raise BadRecordError(
                f"an output cannot be written: {why}",
                topic=topic if limits is None else limits.topic,
                detail=f"yielded with the key {key!r:.120}",
                next_step="correct the processor, or let the topic take it",
            )

    def check_batch(self, batch: pa.RecordBatch) -> None:
        """Check the topics of records that are columns already, and whether these take them.

        Raises:
            BadRecordError: a record names a topic that outputs must not be written to, or cannot be written.
        """
        self._check_columns(batch)
        topics = batch.column("topic")
        if topics.null_count == len(topics):
            return
        for topic in pc.unique(topics).drop_null().to_pylist():
            first = pc.index(topics, topic).as_py()
            self._check(topic, Record(batch.column("key")[first].as_py(), None))

    def _check_columns(self, batch: pa.RecordBatch) -> None:
        """As `_check_rules`, for records that are columns."""
        topics = batch.column("topic")
        names = pc.unique(topics).to_pylist()
        for name in names:
            limits = self._limits_of(name)
            if limits is None:
                continue
            mine = batch
            if len(names) > 1:
                mine = batch.filter(topics.is_null() if name is None else pc.fill_null(pc.equal(topics, name), False))
            columns = [mine.column(each) for each in ("key", "value", "headers", "timestamp")]
            doubtful = limits.doubtful(*columns[:3])
            for key, value, headers, at_ms in zip(
                *(each.take(pa.array(doubtful)).to_pylist() for each in columns), strict=True
            ):
                self._check_rules(name, key, value, [(each["key"], each["value"]) for each in headers or ()], at_ms)

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add records that are columns of the schema already."""
        if batch.num_rows:
            self._batches.append(batch)

    def take(self) -> pa.RecordBatch | None:
        """The next of the records that were added, in the schema; None: there are no more. Usually these are all of
        them: a batch has about 1 GiB at most, because Arrow's offsets end at 2 GiB."""
        if self._keys:
            self._add_listed(0, len(self._keys))
            self._keys.clear()
            self._values.clear()
            self._extras.clear()
        part: list[pa.RecordBatch] = []
        size = 0
        while self._batches and (not part or size + self._batches[0].nbytes <= _TAKEN_BYTES):
            size += self._batches[0].nbytes
            part.append(self._batches.pop(0))
        if len(part) < 2:
            return part[0] if part else None
        return pa.Table.from_batches(part).combine_chunks().to_batches()[0]

    def _add_listed(self, start: int, end: int) -> None:
        """Make batches of records that were added one by one."""
        if sum(map(len, filter(None, self._values[start:end]))) > _TAKEN_BYTES and end - start > 1:
            middle = (start + end) // 2
            self._add_listed(start, middle)
            self._add_listed(middle, end)
            return
        count = end - start
        topics: Any = pa.nulls(count, SCHEMA.field("topic").type)
        headers: Any = pa.nulls(count, SCHEMA.field("headers").type)
        times: Any = pa.nulls(count, SCHEMA.field("timestamp").type)
        if self._extras:
            listed = [self._extras.get(i, (None, None, None)) for i in range(start, end)]
            topics = pa.array([each[0] for each in listed], topics.type)
            times = pa.array([each[2] for each in listed], times.type)
            if any(each[1] for each in listed):
                headers = pa.array([each[1] or None for each in listed], headers.type)
        keys, values = (pa.array(each[start:end], pa.binary()) for each in (self._keys, self._values))
        columns = [keys, values, topics, headers, times]
        columns += [pa.nulls(count, field.type) for field in list(self._schema)[len(columns) :]]
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))


def output_batch(table: pa.Table) -> pa.RecordBatch:
    """A table that a column processor returned, in `SCHEMA`.

    Raises:
        NotTablesError: missing or unknown columns.
        ColumnTypeError: columns of unusable types.
        ValueError, pa.ArrowInvalid: values that cannot be used.
    """
    names = table.column_names
    unknown = set(names) - {"key", "value", "topic", "headers", "timestamp_ms"}
    if unknown or "value" not in names:
        raise NotTablesError(
            f"outputs have the columns {names}: key and value are needed, topic, headers and timestamp_ms possible"
        )
    columns = []
    for field in SCHEMA:
        name = "timestamp_ms" if field.name == "timestamp" else field.name
        if name not in names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = one_chunk(table[name])
        try:
            if name in ("key", "value"):
                column = binary(column, name)
            elif name == "timestamp_ms":
                column = _written_times(milliseconds(column))
            elif name == "headers":
                column = _header_column(column)
            elif column.type != field.type:
                column = column.cast(field.type)
        except (SchemaError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise ColumnTypeError(f"outputs have a column {name} of {table[name].type}: {error}") from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _header_column(column: Any) -> Any:
    kind, wanted = column.type, SCHEMA.field("headers").type
    entries = None if pa.types.is_map(kind) else getattr(kind, "value_type", None)
    if entries is not None and pa.types.is_struct(entries):
        names = [entries.field(at).name for at in range(entries.num_fields)]
        if sorted(names) != ["key", "value"]:  # a cast would fill those that are missing with nulls
            raise ValueError(f"headers are lists of structs of key and value, got the fields {', '.join(names)}")
    if kind != wanted:
        column = column.cast(wanted)
    if pc.struct_field(column.flatten(), 0).null_count:
        raise ValueError("a header has a null key: give every header a key, or leave it out")
    return column


def _written_times(column: Any) -> Any:
    highest = pc.max(column).as_py()
    if highest is not None and highest > timestamps.LATEST_MS:
        raise ValueError(f"timestamp_ms has {highest}: that is no time in milliseconds ({timestamps.in_utc(highest)})")
    return timestamps.known_times(column)


def one_chunk(column: Any) -> Any:
    """The column as one array."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else pc.cast(column, column.type).combine_chunks()
    return column


def _checked(raw: Any, what: str) -> Any:
    if type(raw) is not bytes:
        raise TypeError(f"the serde of the {what} returned {type(raw).__name__}, not bytes")
    return raw


def _no_record(found: Any, records: Any) -> TypeError:
    """The error for something among the records that is not a record."""
    if isinstance(records, (Mapping, str, bytes)):  # returned in place of records; ``found`` is only a part of it
        found = records
    return NotRecordsError(f"expected Records, got {type(found).__name__}: {found!r:.200}")


def _extras(record: Record, schema_id: Header | None) -> _Extras:
    # A record that was read and is yielded unchanged goes to the default topic, not back to the topic it was read from.
    topic = None if record.topic == record._read_from else record.topic
    if topic is not None and not isinstance(topic, str):
        raise TypeError(f"a record's topic is text or None, got {topic!r:.200}")
    if topic is not None:
        _check_text(topic, "a record's topic")
    at_ms: Any = record.timestamp_ms
    if at_ms is not None:
        if isinstance(at_ms, bool) or not isinstance(at_ms, int) or not -(1 << 63) <= at_ms < 1 << 63:
            raise TypeError(f"a record's timestamp_ms is a 64-bit integer or None, got {at_ms!r:.200}")
        if at_ms > timestamps.LATEST_MS:
            raise ValueError(
                f"a record's timestamp_ms is {at_ms}: that is no time in milliseconds ({timestamps.in_utc(at_ms)})"
            )
        at_ms = timestamps.known_ms(at_ms)
    headers: list[Header] = []
    given: Any = record.headers
    for header in given.items() if isinstance(given, Mapping) else (given or ()):
        if not isinstance(header, (tuple, list)) or len(header) != 2:  # of a dict, its names would be taken
            raise TypeError(f"a header is a pair of name and content, got {header!r:.200}")
        name, content = header
        if not isinstance(name, str):
            raise TypeError(f"a header's name is text, got {name!r:.200}")
        _check_text(name, "a header's name")
        if isinstance(content, str):
            content = content.encode()
        elif content is not None and not isinstance(content, bytes):
            raise TypeError(f"header {name} is bytes or None, got {content!r:.200}")
        headers.append((name, content))
    if schema_id is not None and record.value is not None and type(record.value) is not bytes:
        headers = [header for header in headers if header[0] != schema_id[0]]  # that of a value that was read
        if schema_id[1] is not None:
            headers.append(schema_id)
    return topic, headers, at_ms


def _check_text(text: str, what: str) -> None:
    """Python's text may have half of a surrogate pair, which no UTF-8 has.

    Raises:
        ValueError: it has.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} is not text in UTF-8: {error}; got {text!a:.200}") from None
