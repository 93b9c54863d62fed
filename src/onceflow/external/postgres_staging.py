"""How the rows of a task get into a staging table: COPY, in binary, through ADBC.

COPY fails as a whole and does not name a row. So what it would not take is found before, and replaced; the row is
staged with its problem, and becomes a refused row when the batch is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from onceflow.errors import EnvironmentUnusableError
from onceflow.external.postgres_columns import Column, Type
from onceflow.external.postgres_connection import code_may_be_of_a_row, in_line, kind_of
from onceflow.external.receipts import with_reasons
from onceflow.external.rows import null_key

#: Columns of a staging table: which task has staged the row, and where it stands in the task's rows.
RECEIPT, ROW = "receipt", "row"
#: Another one: why the row cannot be in the table, which only tasks could see; mostly null.
PROBLEM = "problem"
#: The headers of a record as two arrays, because structs cannot be staged.
HEADERS = {"onceflow_header_names": "bytea[]", "onceflow_header_values": "bytea[]"}

# Days and seconds from 1970-01-01 to the first and behind the last day that PostgreSQL has (4714-11-24 BC,
# 5874897-12-31; src/include/datatype/timestamp.h). The last moment of Arrow's timestamps is before its last one.
_FIRST_DAY, _END_DAY = -2_440_588, 2_145_042_906
_FIRST_SECOND = _FIRST_DAY * 86_400
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_MAX_MICROS = 2**63 - 1

#: Decimals that drivers before 1.12 have stored with other digits.
_DECIMALS = [Decimal(text) for text in ("5000000000.000001", "-5000000000.000001", "10000.000100", "0.000001")]

#: Places in an array of values, with the class of error that PostgreSQL has for such a value, what is wrong, and what
#: can be staged in its place.
_Faults = Mapping[int, tuple[str, str, Any]]


def only_staged(name: str, kind: str, staged_in: str) -> Column:
    """A column of the staging table that the table does not have."""
    return Column(name, kind, Type(kind, kind == "text"), staged_as=kind, staged_in=staged_in)


def record_columns(kinds: Mapping[str, str]) -> list[Column]:
    """Columns of the rows' records, for dead letters.

    Args:
        kinds: in which types they are staged. Text is staged as its bytes: a record may have what is no text, and its
            row may be good all the same.
    """
    exact = {name: "bytea" if kind == "text" and name != "topic" else kind for name, kind in kinds.items()}
    return [only_staged(name, kind, f"r{number}") for number, (name, kind) in enumerate(exact.items())]


class TaskRows:
    """The rows of a task, as they are staged.

    Args:
        receipt: of the task. columns: of the table, as far as they are written, and the flag.
        record: columns of the rows' records. required, encoding: as of `storable`.

    Attributes:
        total: how many rows were read.
    """

    def __init__(
        self,
        receipt: str,
        columns: Sequence[Column],
        record: Sequence[Column],
        *,
        required: Collection[str],
        encoding: str,
    ) -> None:
        self._receipt = receipt
        self._columns = columns
        self._record = record
        self._required = required
        self._encoding = encoding
        self._limits = {each.name: limit for each in columns if (limit := each.cuts_text)}
        self.total = 0

    def staged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The next rows, with the columns of the staging table."""
        names = [each.name for each in self._columns]
        columns = [batch.column(name) for name in names]
        problems, sound = storable(columns, names, self._required, self._encoding, self._limits)
        exact = [_recorded(batch, each) for each in self._record]
        _, record = storable(exact, [each.name for each in self._record], (), self._encoding)
        places = pa.array(np.arange(self.total, self.total + batch.num_rows))
        self.total += batch.num_rows
        return pa.RecordBatch.from_arrays(
            [pa.repeat(self._receipt, batch.num_rows), places, problems, *sound, *record],
            [RECEIPT, ROW, PROBLEM, *(each.staged_in for each in [*self._columns, *self._record])],
        )

    def again(self, total: int) -> None:
        """Rows behind this number were not staged."""
        self.total = total

    def reader(self, batches: Iterator[pa.RecordBatch], first: pa.RecordBatch) -> pa.RecordBatchReader:
        """All rows.

        Args:
            first: the first batch, and batches: all others.
        """
        begun = self.staged(first)
        return pa.RecordBatchReader.from_batches(begun.schema, chain([begun], map(self.staged, batches)))


class Copy:
    """COPY of the rows of a task to its staging table.

    Args:
        dsn: of the database. schema, table: of the staging table.
    """

    def __init__(self, dsn: str, schema: str, table: str, rows: TaskRows) -> None:
        self._dsn = dsn
        self._schema = schema
        self._table = table
        self._rows = rows

    def all_of(self, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]) -> list[pa.Table]:
        """Bring all rows there. Returns no refused ones.

        Raises:
            adbc_driver_manager.Error: they are not there. A row may be the cause: nobody knows which one.
        """
        with self._connected() as connection:
            self._copy(connection, self._rows.reader(batches, first))
        return []

    def taken(self, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]) -> list[pa.Table]:
        """Bring the rows there that COPY takes; the others are returned, with the reasons. One that is too large for a
        page of the server (8 kB, without what is kept outside) is not taken, for example.

        Raises:
            adbc_driver_manager.Error: no row is to blame.
        """
        from adbc_driver_postgresql import dbapi

        refused = []
        with self._connected() as connection:
            for batch in chain([first], batches):
                parts = [batch]
                while parts:
                    part, before = parts.pop(), self._rows.total
                    try:
                        self._copy(connection, self._rows.reader(iter(()), part))
                        continue
                    except dbapi.Error as error:
                        if not code_may_be_of_a_row(error.sqlstate or ""):
                            raise
                        failed = error
                    connection.rollback()
                    self._rows.again(before)
                    if part.num_rows > 1:
                        middle = part.num_rows // 2
                        parts += [part[middle:], part[:middle]]
                        continue
                    self._copy(connection, self._rows.reader(iter(()), part[:0]))  # else the table is to blame
                    reason = (0, kind_of(failed.sqlstate or ""), _said_by_copy(failed))
                    refused.append(with_reasons(part, [reason]))
        return refused

    def _connected(self) -> Any:
        from adbc_driver_postgresql import dbapi

        return dbapi.connect(self._dsn)

    def _copy(self, connection: Any, reader: pa.RecordBatchReader) -> None:
        with connection.cursor() as cursor:
            cursor.adbc_ingest(self._table, reader, mode="append", db_schema_name=self._schema)
        connection.commit()


def _said_by_copy(error: Exception) -> str:
    """What the server has said."""
    said = str(error).partition("PGRES_FATAL_ERROR")[2].strip().splitlines()
    return said[0].partition(":")[2].strip() if said else in_line(error)


def _recorded(batch: pa.RecordBatch, column: Column) -> pa.Array:
    """A column of the records."""
    if column.name in HEADERS:
        headers = batch.column("headers")
        part = pc.struct_field(headers.values, [[*HEADERS].index(column.name)])
        return pa.ListArray.from_arrays(headers.offsets, part.cast(pa.binary()))
    found = batch.column(column.name)
    return found.cast(pa.binary()) if column.staged_as == "bytea" else found


def storable(
    columns: Sequence[pa.Array],
    names: Sequence[str],
    required: Collection[str],
    encoding: str,
    limits: Mapping[str, int] | None = None,
) -> tuple[pa.Array, list[pa.Array]]:
    """Rows without what PostgreSQL has no place for.

    Args:
        names: of the columns. required: those that must not be null.
        encoding: Python's name for the encoding of the database.
        limits: the bytes that columns keep of a text which is longer.

    Returns:
        The problem of each row (mostly null), as ``ClassOfError: message``; and the columns as they can be staged.
    """
    problems: dict[int, str] = {}
    sound = []
    for name, column in zip(names, columns, strict=True):
        is_list = kinds.is_list(column.type) or kinds.is_large_list(column.type)
        values = column.flatten() if is_list else column
        faults = _faults(values, encoding)
        if limits and name in limits:
            faults = {**_too_long(values, encoding, limits[name]), **faults}  # such a text can be staged as it is
        if faults:
            rows = pc.list_parent_indices(column).to_pylist() if is_list else None
            for place, (kind, text, _) in faults.items():
                row = place if rows is None else rows[place]
                problems.setdefault(row, f"{kind}: column {name} has {text}")
            values = _replaced(values, faults)
            column = _as_lists(column, values) if is_list else values
        if name in required and column.null_count:
            for row in pc.indices_nonzero(column.is_null()).to_pylist():
                problems.setdefault(row, f"NotNullViolation: {null_key(name)}")
        sound.append(column)
    total = len(columns[0]) if columns else 0
    if not problems:
        return pa.nulls(total, pa.string()), sound
    return pa.array([problems.get(row) for row in range(total)], pa.string()), sound


def _faults(values: pa.Array, encoding: str) -> _Faults:
    kind = values.type
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return _faults_of_text(values, encoding)
    if kinds.is_date32(kind):
        days = values.cast(pa.int32())
        return _outside(days, _FIRST_DAY, _END_DAY - 1, "day", lambda day: f"the day {day:,} after 1970-01-01")
    if kinds.is_timestamp(kind):
        per_s = _PER_SECOND[kind.unit]
        last = _MAX_MICROS * per_s // 1_000_000 if per_s < 1_000_000 else _MAX_MICROS
        first = max(_FIRST_SECOND * per_s, -_MAX_MICROS - 1)
        return _outside(
            values.cast(pa.int64()), first, last, "time", lambda at: f"the time {at:,} {kind.unit} after 1970-01-01"
        )
    return {}


def _outside(numbers: pa.Array, first: int, last: int, what: str, shown: Callable[[int], str]) -> _Faults:
    """Values that are not between two others."""
    low, high = pc.min_max(numbers).as_py().values()
    if low is None or (low >= first and high <= last):
        return {}
    return {
        place: ("DatetimeFieldOverflow", f"{shown(number)}, a {what} that PostgreSQL has no place for", None)
        for place, number in enumerate(numbers.to_pylist())
        if number is not None and not first <= number <= last
    }


def _faults_of_text(values: pa.Array, encoding: str) -> _Faults:
    try:
        values.validate(full=True)
        is_utf8 = True
    except pa.ArrowInvalid:
        is_utf8 = False
    if is_utf8 and encoding == "utf-8" and not pc.any(pc.match_substring(values, "\0")).as_py():
        return {}
    faults = {}
    binary = pa.large_binary() if kinds.is_large_string(values.type) else pa.binary()
    for place, raw in enumerate(values.cast(binary).to_pylist()):
        found = None if raw is None else _fault_of_text(raw, encoding)
        if found is not None:
            faults[place] = found
    return faults


def _too_long(values: pa.Array, encoding: str, limit: int) -> _Faults:
    """Texts of which a column would keep the beginning only."""
    wrong = f"a text of more than {limit} bytes, which its type would cut"
    texts = [
        None if raw is None else raw.decode(errors="replace") for raw in values.cast(pa.large_binary()).to_pylist()
    ]
    return {
        place: ("StringDataRightTruncation", wrong, text)
        for place, text in enumerate(texts)
        if text is not None and len(text.encode(encoding, "replace")) > limit
    }


def _fault_of_text(raw: bytes, encoding: str) -> tuple[str, str, str] | None:
    text, kind, found = raw.decode(errors="replace"), "", ""
    if b"\0" in raw:
        kind, found = "UntranslatableCharacter", "the character 0x00, which PostgreSQL cannot store"
        text = text.replace("\0", "\ufffd")
    if not found and text.encode() != raw:
        kind, found = "CharacterNotInRepertoire", "bytes that are not text in UTF-8"
    escaped = text.encode(encoding, "backslashreplace").decode(encoding)
    if not found and escaped != text:
        kind, found = "UntranslatableCharacter", f"a character that the database's encoding {encoding} lacks"
    return (kind, found, escaped) if found else None


def _replaced(values: pa.Array, faults: _Faults) -> pa.Array:
    mask = pa.array([place in faults for place in range(len(values))])
    return pc.replace_with_mask(values, mask, pa.array([sound for *_, sound in faults.values()], values.type))


def _as_lists(lists: pa.Array, values: pa.Array) -> pa.Array:
    """The same lists with other values."""
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(lists), 0))
    offsets = pa.concat_arrays([pa.array([0], ends.type), ends])
    made = pa.LargeListArray if kinds.is_large_list(lists.type) else pa.ListArray
    return made.from_arrays(offsets, values, type=lists.type, mask=lists.is_null())


@cache
def check_driver(dsn: str) -> None:
    """Let the driver send decimals, once in a process. Drivers before 1.12 have stored other digits.

    Raises:
        EnvironmentUnusableError: it sends other ones.
    """
    import adbc_driver_postgresql
    from adbc_driver_postgresql import dbapi

    sent = pa.record_batch({"sent": pa.array(_DECIMALS, pa.decimal128(18, 6))})
    with dbapi.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT $1::numeric::text", parameters=sent)
        stored = [Decimal(text) for (text,) in cursor.fetchall()]
    if stored != _DECIMALS:
        raise EnvironmentUnusableError(
            f"The driver adbc-driver-postgresql {adbc_driver_postgresql.__version__} stores wrong decimals",
            detail=f"sent {_listed(_DECIMALS)}; stored {_listed(stored)}",
            next_step="pip install --upgrade 'adbc-driver-postgresql>=1.12', on executors, too",
        )


def _listed(numbers: Sequence[Decimal]) -> str:
    return ", ".join(map(str, numbers))
