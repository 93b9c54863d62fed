"""``ColumnEngine``: runs a ``ColumnProcessor`` over one partition's part of a batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow import user_code
from onceflow.errors import ProcessorError, counted
from onceflow.protocol import timestamps
from onceflow.state.api import user_errors
from onceflow.state.api.dictionaries import decoded
from onceflow.state.api.json_columns import JsonRowError
from onceflow.state.api.processor import BadRows, ColumnContext, ColumnProcessor
from onceflow.state.api.scope import ABSENT
from onceflow.state.api.serdes import BYTES, Struct
from onceflow.state.api.whole_numbers import NEXT_STEP, cast, changed, rounded, with_nullable_integers
from onceflow.state.engine import input_batch
from onceflow.state.engine.base import NOT_OF_A_RECORD, BaseEngine
from onceflow.state.engine.output_collector import ColumnTypeError, NotTablesError, one_chunk, output_batch
from onceflow.state.engine.shapes import STATE_COLUMNS
from onceflow.state.format import rows

_PREFIX = pa.scalar(rows.VALUE, pa.binary())
_NO_SEPARATOR = pa.scalar(b"", pa.binary())


class ColumnEngine(BaseEngine):
    """See `BaseEngine`.

    A call of process() that fails is repeated: without the bad records if it names them (``BadRows``), otherwise with
    each half of its records, until the bad ones are found.
    """

    processor: ColumnProcessor

    def __init__(self, processor: ColumnProcessor, *arguments: Any, **options: Any) -> None:
        super().__init__(processor, *arguments, **options)
        self._struct = None if processor.state_fields is None else Struct(processor.state_fields)
        if self._struct is not None:
            self._scope.decode = self._struct.decode
            reserved = STATE_COLUMNS & set(self._struct.fields)
            if reserved:
                raise ValueError(f"state_fields cannot be named {', '.join(sorted(reserved))}")
        self._fields = pa.schema([("value", pa.binary())]) if self._struct is None else self._struct.schema
        self._context = ColumnContext(
            self.partition, self.now_ms, self.watermark_ms, MappingProxyType(dict(self._scope.tables))
        )
        self._asked: Any = self.processor.process  # the method that was called last
        self._known_times: Any = None  # of the last attempt, if event_time() has given them

    def _feed(self, batch: pa.RecordBatch) -> None:
        error = self._attempt(batch)
        while isinstance(error, BadRows) and self._scope.fatal is None:
            batch = self._without(batch, error)
            error = self._attempt(batch)
        if error is None:
            return
        if self._scope.fatal is not None:
            raise self._located(self._scope.fatal) from error
        first = self._raw(batch.slice(0, 1))[0]
        if batch.num_rows == 1:
            if isinstance(error, JsonRowError) and error.document is not None and error.document == first.value:
                reason = f"{error.reason}; it is {user_errors.shown(first.value)}"
                user_errors.explain(
                    error, f"the value of the record is not JSON with the fields that parse_json reads: {reason}"
                )
            self._reject(first, error)
            self._note_rejected(batch, range(batch.num_rows))
            return
        middle = batch.num_rows // 2
        self._feed(batch.slice(0, middle))
        self._feed(batch.slice(middle))
        if self._dead_letter_topic is None:
            what = f"{counted(batch.num_rows, 'record')} could not be processed together"
            raise self._failed(what, error, first, "fewer at a time succeed") from error

    def _attempt(self, batch: pa.RecordBatch) -> Exception | None:
        """Process all records or none. Returns what went wrong.

        The error is returned, and the caller does not handle it inside an except clause: otherwise Python would chain
        the errors of all attempts.
        """
        if not batch.num_rows:
            return None
        mark, counts = self._collector.mark(), dict(self.counts)
        try:
            self._work(batch)
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            user_errors.returned_by(error, self._asked)
            if self._asked == self.processor.event_time:
                user_code.of_hook(error, user_code.EVENT_TIME)
            if isinstance(error, ColumnTypeError):
                user_code.of_hook(error, user_code.COLUMN_TYPES)
            if isinstance(error, NotTablesError) and self._scope.fatal is None:
                self._scope.fatal = self._of_the_result(error)
            self._collector.truncate(mark)
            self.counts.update(counts)
            return error
        return None

    def _of_the_result(self, error: NotTablesError) -> ProcessorError:
        """The error for a result that has not the form it has to have. It fails the batch."""
        name = getattr(self._asked, "__name__", "process")
        return ProcessorError(
            f"{name}() has returned what cannot be used: {user_errors.text_of(error)}",
            detail=", ".join(filter(None, (f"table {self.table}-{self.partition}", user_errors.line_of(error)))),
            next_step=f"correct {name}(). No record is at fault, so there are no dead letters of them.",
        )

    def _without(self, batch: pa.RecordBatch, bad: BadRows) -> pa.RecordBatch:
        """Returns the records that are not bad, and writes dead letters for the others."""
        numbers = sorted(bad.causes)
        away = batch.take(pa.array(numbers, pa.int64()))
        for record, row in zip(self._raw(away), numbers, strict=True):
            self._reject(record, bad.causes[row])
        self._note_rejected(batch, numbers)
        others = np.ones(batch.num_rows, dtype=bool)
        others[numbers] = False
        return batch.filter(pa.array(others))

    def _note_rejected(self, batch: pa.RecordBatch, numbers: Sequence[int]) -> None:
        """Note which of the rejected records have no event time, see `_note_times`.

        Args:
            batch: the batch of the last attempt.
            numbers: the row numbers of the records that are rejected.
        """
        if self._known_times is not None and self._known_times.null_count:
            places = pa.array(numbers, pa.int64())
            self._note_untimed(batch.take(places).filter(self._known_times.take(places).is_null()))

    def _work(self, batch: pa.RecordBatch) -> None:
        """Process all records or none."""
        self._known_times = None
        places = np.arange(batch.num_rows)
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if "timestamp" in columns:
            columns["timestamp_ms"] = columns.pop("timestamp")
        given, times = batch, None
        if self.uses_event_time:
            times = self._known_times = self._times(columns, batch.num_rows)
            in_time = self._set_late_aside(batch, times)
            if in_time is not None:
                mask, places = pa.array(in_time), places[in_time]
                batch, columns = batch.filter(mask), {name: column.filter(mask) for name, column in columns.items()}
        if batch.num_rows:
            self._call(columns, places)
        if times is not None:
            self._note_times(given, times)

    def _call(self, columns: dict[str, Any], places: npt.NDArray[np.int64]) -> None:
        """Process all records or none.

        Args:
            columns: what user code gets of them.
            places: their row numbers in the batch.
        """
        encoded = columns["key"].dictionary_encode()
        keys = encoded.dictionary
        row_keys = pc.binary_join_element_wise(_PREFIX, keys, _NO_SEPARATOR).to_pylist()
        states = self._states(keys, self._overlay.get_many(row_keys))
        columns["state"] = encoded.indices
        result: Any
        self._asked = self.processor.process
        try:
            result = self._asked(with_nullable_integers(pa.table(columns)), states, self._context_of(keys))
        except BadRows as bad:
            raise _of_batch(bad, places.tolist()) from bad
        if result is None:
            return
        if not isinstance(result, tuple) or len(result) != 2:
            raise NotTablesError(f"a tuple of outputs and new states is expected, got {type(result).__name__}")
        outputs, new_states = result
        made = None if outputs is None else output_batch(as_table(outputs, "outputs"))
        changed = None if new_states is None else self._rows(as_table(new_states, "new states"), keys, row_keys)
        if made is not None:
            self._collector.check_batch(made)
        small = self._overlay.large_bytes
        if changed is not None and max(map(len, filter(None, (*changed[0], *changed[1]))), default=0) > small:
            for row_key, row in zip(*changed, strict=True):
                self._check_row(row_key, row)
        # From here on, nothing can fail.
        if made is not None:
            self._collector.add_batch(made)
        if changed is not None:
            self._overlay.put_many(*changed)

    def _context_of(self, keys: pa.Array) -> ColumnContext:
        """The context of records with these keys."""
        if not self._scope.tables:
            return self._context
        record_keys = functools.cache(keys.to_pylist)  # only if a key is not found
        tables = {name: table.beside(record_keys) for name, table in self._scope.tables.items()}
        return self._context._replace(tables=MappingProxyType(tables))

    def _times(self, columns: Mapping[str, Any], count: int) -> Any:
        """Event times as an int64 Arrow array, null where the time is not known.

        Args:
            columns: what user code gets of the batch.
            count: how many records it has.

        Raises:
            BadRows: event times are too far ahead of the clock.
        """
        self._asked = self.processor.event_time
        times = self._asked(with_nullable_integers(pa.table(columns)))
        if times is None:
            return pa.nulls(count, pa.int64())
        array = decoded(times if isinstance(times, (pa.Array, pa.ChunkedArray)) else pa.array(times))
        known = timestamps.known_times(input_batch.milliseconds(one_chunk(array)))
        if len(known) != count:
            raise NotTablesError(f"{counted(count, 'time')} are expected, one for each record, got {len(known)}")
        far = self._far_ahead(known)
        if far is not None:
            raise BadRows({row: self._ahead(known[row].as_py()) for row in np.flatnonzero(far).tolist()})
        return known

    # ---- state ---------------------------------------------------------------------------------------

    def _states(self, keys: Any, found: list[bytes | None]) -> pa.Table:
        """The table of states, with one row for each key."""
        payloads, skip = self._payloads(keys, found)
        present = [payload for payload in payloads if payload is not None]
        if self._struct is None:
            columns = {"value": pa.array([payload[skip:] for payload in present], pa.binary())}
        else:
            try:
                columns = self._struct.decode_columns(present, skip)
            except ValueError as error:
                raise self._scope.unreadable(error) from error
        exists: npt.NDArray[np.bool_] = np.ones(len(payloads), dtype=bool)
        if len(present) < len(payloads):
            exists = np.fromiter((payload is not None for payload in payloads), dtype=bool, count=len(payloads))
            places = pa.array(np.cumsum(exists) - 1, mask=~exists)
            columns = {name: column.take(places) for name, column in columns.items()}
        return with_nullable_integers(pa.table({"key": keys, **columns, "exists": pa.array(exists)}))

    def _payloads(self, keys: Any, found: list[bytes | None]) -> tuple[list[bytes | None], int]:
        """The rows, with None for expired ones, and how many bytes of each row come before the payload."""
        scope = self._scope
        flags = {row[0] for row in found if row is not None}
        if not flags:
            return found, 0
        if flags == {0} and not scope.version:
            return found, 1
        if flags == {scope.header[0]}:
            return self._uniform(keys, found)
        return self._one_by_one(keys, found), 0

    def _uniform(self, keys: Any, found: list[bytes | None]) -> tuple[list[bytes | None], int]:
        """As `_payloads`, for rows that all have the same flags as the rows that this engine writes."""
        scope = self._scope
        skip = len(scope.header)
        heads = np.frombuffer(
            b"".join([scope.header if row is None else row[:skip] for row in found]), dtype=np.uint8
        ).reshape(len(found), skip)
        if scope.version:
            versions = heads[:, skip - 4 :]
            if (versions != np.frombuffer(scope.header[-4:], dtype=np.uint8)).any():
                return self._one_by_one(keys, found), 0
        if skip >= 9:  # flags and expiry; the order of its bytes is the order of the times
            expires = np.ascontiguousarray(heads[:, 1:9]).view(">u8").reshape(len(found))
            over = expires <= int.from_bytes(rows.time_bytes(self.now_ms), "big")
            if over.any():
                found = [None if gone else row for row, gone in zip(found, over.tolist(), strict=True)]
        return found, skip

    def _one_by_one(self, keys: Any, found: list[bytes | None]) -> list[bytes | None]:
        """As `_payloads`, for rows of which some may have to be migrated."""
        payloads = []
        for place, row in enumerate(found):
            try:
                payloads.append(self._payload(row))
            except ProcessorError as error:
                self._located(error, keys[place].as_py())
                raise
        return payloads

    def _payload(self, row: bytes | None) -> bytes | None:
        """The payload of one row in the format of this version; None if the row has expired."""
        if row is None or self._scope.has_expired(row):
            return None
        payload, _, version = rows.unpack(row)
        if version == self._scope.version:
            return payload
        value = self._scope.migrated(payload, version, None)
        if value is ABSENT or value is None:
            return None
        try:
            encoded: bytes = BYTES.encode(value) if self._struct is None else self._struct.encode(value)
        except Exception as error:
            raise self._scope.not_migrated(error, version, None) from error
        return encoded

    def _rows(self, new: pa.Table, keys: Any, row_keys: list[bytes]) -> tuple[list[bytes], list[bytes | None]]:
        """Row keys and rows of new states.

        Raises:
            ValueError: columns are missing or unknown, or a key is in none of the records.
        """
        names = set(new.column_names)
        missing = {"key", *self._fields.names} - names
        unknown = names - {"key", "exists", "deleted", *self._fields.names}
        if missing or unknown:
            raise NotTablesError(f"new states have columns {new.column_names}: missing {missing}, unknown {unknown}")
        count = new.num_rows
        new_keys = input_batch.binary(one_chunk(new["key"]), "key")
        if not new_keys.equals(keys):
            row_keys = self._picked(new_keys, keys, row_keys)
        deleted = None
        if "deleted" in names:
            deleted = one_chunk(new["deleted"]).cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
        fields = {field.name: _cast(one_chunk(new[field.name]), field) for field in self._fields}
        packed: Sequence[bytes | None]
        if self._struct is not None:
            packed = self._struct.encode_columns(fields, count, self._scope.header)
        else:
            values = fields["value"]
            nulls = values.is_null().to_numpy(zero_copy_only=False)
            if (nulls if deleted is None else nulls & ~deleted).any():
                raise ValueError("a new state has the value null: delete it with the column deleted")
            header = self._scope.header
            packed = [None if value is None else header + value for value in values.to_pylist()]
        changed: list[bytes | None] = list(packed)
        if deleted is not None and deleted.any():
            changed = [None if gone else row for row, gone in zip(changed, deleted.tolist(), strict=True)]
        return row_keys, changed

    def _picked(self, new_keys: Any, keys: Any, row_keys: list[bytes]) -> list[bytes]:
        places = pc.index_in(new_keys, keys)
        if places.null_count:
            stranger = new_keys.filter(places.is_null())[0].as_py()
            raise ValueError(f"new states have key {stranger!r:.200}, which none of the records has")
        where: npt.NDArray[np.int32] = places.to_numpy()
        if len(where) and np.bincount(where).max() > 1:
            raise ValueError("new states have a key twice")
        return [row_keys[i] for i in where.tolist()]


def _of_batch(bad: BadRows, places: list[int]) -> Exception:
    """The same error with row numbers of the batch. They differ, because late records are not passed to process().

    Args:
        places: row numbers in the batch of the records that were processed.
    """
    strange = [row for row in bad.causes if not 0 <= row < len(places)]
    if strange or not bad.causes:
        return NotTablesError(f"BadRows names {strange or 'no records'}; there are {len(places)}")
    return BadRows({places[row]: cause for row, cause in bad.causes.items()})


def as_table(given: Any, what: str) -> pa.Table:
    """A pyarrow table of what user code returned, without dictionaries.

    Raises:
        NotTablesError: it is not of pyarrow or pandas, and has no ``__arrow_c_stream__`` (as Polars and DuckDB do).
    """
    if isinstance(given, pa.RecordBatch):
        table = pa.Table.from_batches([given])
    elif type(given).__module__.partition(".")[0] == "pandas":
        table = pa.Table.from_pandas(given, preserve_index=False)
    elif isinstance(given, pa.Table) or hasattr(given, "__arrow_c_stream__"):
        table = given if isinstance(given, pa.Table) else pa.table(given)
    else:
        raise NotTablesError(f"{what} are a table of pyarrow, pandas or Polars, got {type(given).__name__}")
    return pa.table([decoded(column) for column in table.columns], names=table.column_names)


def _cast(column: Any, field: Any) -> Any:
    if column.type == field.type:
        return column
    kinds = _kind(column.type), _kind(field.type)
    if kinds[0] != kinds[1] and not pa.types.is_null(column.type):  # Arrow makes true of 2, and times of numbers
        raise ColumnTypeError(f"state field {field.name} is {field.type}, got a column of {column.type}")
    large = rounded(column, field.type)
    if large is not None:
        raise ValueError(
            f"state field {field.name} is {field.type}, got the float {large!r}, which may be another number, rounded: "
            + NEXT_STEP
        )
    other = changed(column, field.type)
    if other is not None:
        raise ValueError(f"state field {field.name} is {field.type}, and {other!r} would be another number in it")
    try:
        return cast(column, field.type)
    except pa.ArrowException as error:
        raise ValueError(f"state field {field.name} is {field.type}: {error}") from None


def _kind(given: pa.DataType) -> str:
    """What values of a type are. Only a cast to a type of the same kind keeps what they mean."""
    if pa.types.is_integer(given) or pa.types.is_floating(given) or pa.types.is_decimal(given):
        return "numbers"
    names = ("string", "binary", "large_string", "large_binary", "string_view", "binary_view", "fixed_size_binary")
    return "text" if any(getattr(pa.types, f"is_{name}")(given) for name in names) else str(given)
