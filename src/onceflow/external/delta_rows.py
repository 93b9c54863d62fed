"""Which rows a table of Delta Lake takes.

Files are added to the table as they are, so nobody but their writer enforces what the table asks for. A null in a
column that must not be null would be committed; in a partition column, delta-rs could not open the table any more.
Columns that must not be null, at any depth, and texts that cannot be told apart are checked here. Check constraints,
invariants and generated columns are left to delta-rs: it writes the rows to a table of its own that is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from onceflow.errors import OptionError, SchemaError
from onceflow.external.delta_files import NULL_PARTITION, can_divide_by
from onceflow.external.delta_storage import load_deltalake
from onceflow.external.receipts import Refused

#: What a table may ask of its writers, so that files can be added after a look at their rows, and that deltalake
#: commits.
_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",  # no change files are needed where rows are only added
        "checkConstraints",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
    }
)
# Without a list of features, a version stands for all features up to it: 5 has column mapping.
_LEGACY_WRITER_MAX = 4
_LISTED_WRITER = 7
_CONSTRAINT = "delta.constraints."
_INVARIANT, _GENERATED = "delta.invariants", "delta.generationExpression"
_IDENTITY = "delta.identity."
#: Where Spark keeps that a column of strings is a VARCHAR or CHAR: only its writers enforce the length.
_SIZED = "__CHAR_VARCHAR_TYPE_STRING"
_SIZE = re.compile(r"(?:var)?char\((\d+)\)")
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, in days since 1970
_ODD = frozenset(" ,;{}()\n\t=")
_OS_ERROR = re.compile(r"\(os error \d+\)")  # how Rust writes errors of the system


@dataclass(frozen=True)
class TableFacts:
    """What a table asks of rows. It is pickled.

    Args:
        root: of the table. schema: as Delta's protocol writes it in JSON.
        constraints: check constraints, by name.
    """

    root: str
    schema: str
    partition_by: tuple[str, ...]
    constraints: Mapping[str, str] = field(default_factory=dict)

    @property
    def arrow(self) -> pa.Schema:
        """The schema, with what must not be null."""
        return pa.schema(load_deltalake().Schema.from_json(self.schema).to_arrow())

    @property
    def metadata(self) -> dict[str, dict[str, Any]]:
        """Metadata of each column."""
        return {each["name"]: each.get("metadata") or {} for each in json.loads(self.schema)["fields"]}

    @property
    def sized(self) -> dict[str, tuple[str, int]]:
        """Columns of strings whose length is limited: the type, as Spark writes it, and the number of characters."""
        found = {name: _SIZE.fullmatch(str(metadata.get(_SIZED, ""))) for name, metadata in self.metadata.items()}
        return {name: (match[0], int(match[1])) for name, match in found.items() if match}

    @property
    def sized_within(self) -> list[str]:
        """Columns with strings in structs, arrays or maps whose length is limited."""
        return [
            each["name"]
            for each in json.loads(self.schema)["fields"]
            if _SIZED in json.dumps(each["type"])
            or ("char(" in str((each.get("metadata") or {}).get(_SIZED, "")) and each["name"] not in self.sized)
        ]

    @property
    def has_expressions(self) -> bool:
        """Whether rows are checked by expressions of SQL."""
        fields = json.dumps(json.loads(self.schema)["fields"])
        return bool(self.constraints) or _INVARIANT in fields or _GENERATED in fields


def facts_of(table: Any, root: str) -> TableFacts:
    """What a table asks of rows now.

    Raises:
        SchemaError: it asks for something that neither this module nor delta-rs does.
    """
    protocol, configuration = table.protocol(), table.metadata().configuration
    asked = [f"the feature {name}" for name in sorted(set(protocol.writer_features or ()) - _FEATURES)]
    legacy = protocol.writer_features is None and protocol.min_writer_version > _LEGACY_WRITER_MAX
    if legacy or protocol.min_writer_version > _LISTED_WRITER:
        asked.append(f"writer version {protocol.min_writer_version}")
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        asked.append("column mapping")
    constraints = {
        name.removeprefix(_CONSTRAINT): text for name, text in configuration.items() if name.startswith(_CONSTRAINT)
    }
    # deltalake has the metadata of a column in another order each time.
    schema = json.dumps(json.loads(table.schema().to_json()), sort_keys=True)
    facts = TableFacts(root, schema, tuple(table.metadata().partition_columns), constraints)
    asked += [
        f"an identity for column {name}"
        for name, metadata in facts.metadata.items()
        if any(key.startswith(_IDENTITY) for key in metadata)
    ]
    asked += [f"a length of strings within column {name}" for name in facts.sized_within]
    if asked:
        raise SchemaError(
            f"The table in {root} asks more of its writers than onceflow does",
            detail=", ".join(asked),
            next_step="use a table without that, or write to another table that a job of Spark merges",
        )
    return facts


def new_table_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a table that is created for rows with this schema. It does not depend on Spark's settings.

    Raises:
        SchemaError: a type or a name cannot be written, or two columns have the same name.
    """
    _check_double(schema)
    plain = pa.schema([pa.field(each.name, _plain(each.type, each.name)) for each in schema])
    odd = sorted({name for name in _all_names(plain) if not name or _ODD & set(name)})
    if odd:
        raise SchemaError(
            f"Columns of a new table of Delta Lake cannot be named {', '.join(map(repr, odd))}",
            detail="Spark cannot read a table if one of its names is empty, or has a blank or one of ,;{}()=",
            next_step="rename them",
        )
    return plain


def _check_double(schema: pa.Schema) -> None:
    names = [name.lower() for name in schema.names]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise SchemaError(f"Several columns are named {', '.join(double)}", next_step="rename them: Spark ignores case")


def _all_names(fields: Iterable[pa.Field]) -> Iterator[str]:
    """Names of columns, and of fields of structs in them."""
    for each in fields:
        yield each.name
        kind = each.type
        while types.is_list(kind) or types.is_map(kind):
            kind = kind.item_type if types.is_map(kind) else kind.value_type
        if types.is_struct(kind):
            yield from _all_names(kind)


def check_partition_by(names: Sequence[str], schema: pa.Schema) -> None:
    """Check that files can be divided by these columns.

    Raises:
        OptionError: a column is named twice.
        SchemaError: there is no such column, or values of its type cannot be told apart as text.
    """
    if len(set(names)) < len(names):
        raise OptionError(f"partition_by={list(names)} names a column twice", next_step="name each column once")
    for name in names:
        if name not in schema.names:
            raise SchemaError(
                f"There is no column {name}, by which files are divided",
                detail=f"the columns are {', '.join(schema.names)}",
                next_step="select it, or change partition_by=",
            )
        if not can_divide_by(schema.field(name).type):
            raise SchemaError(
                f"Files cannot be divided by column {name}, which has the type {schema.field(name).type}",
                detail="some of its values cannot be told apart as text, or are read back as other values",
                next_step="use a string, a whole number, a boolean or a date",
            )


def check_columns(facts: TableFacts, schema: pa.Schema) -> None:
    """Check that the table takes rows with this schema.

    Raises:
        SchemaError: it does not.
    """
    _check_double(schema)
    known = facts.arrow
    for given in schema:
        there = _plain(known.field(given.name).type, given.name) if given.name in known.names else None
        if there is None or _plain(given.type, given.name) != there:
            raise SchemaError(
                f"Column {given.name} does not fit the table in {facts.root}",
                detail=f"the rows have {given.type}, the table has {'no such column' if there is None else there}",
                next_step="cast it, leave it out, or add it to the table",
            )
    missing = [each.name for each in known if not each.nullable and each.name not in schema.names]
    if missing:
        raise SchemaError(
            f"Columns {', '.join(missing)} of the table in {facts.root} must not be null", next_step="select them"
        )
    for name, metadata in facts.metadata.items():
        if _GENERATED in metadata and name not in schema.names:
            raise SchemaError(
                f"Column {name} of the table in {facts.root} is computed by its writers",
                next_step=f"select it: {metadata[_GENERATED]} AS {name}",
            )
    check_partition_by(facts.partition_by, known)
    check_written(schema, facts.partition_by, facts.root)


def check_written(schema: pa.Schema, partition_by: Sequence[str], root: str) -> None:
    """Check that files have a column. One without any has no rows."""
    if not set(schema.names) - set(partition_by):
        what = "only columns by which it is partitioned" if schema.names else "no columns"
        raise SchemaError(
            f"The rows have {what} of the table in {root}",
            detail=f"files have the other columns, so these would have no rows; the rows have {schema.names}",
            next_step="select another column of the table, too",
        )


def check_expressions(facts: TableFacts) -> None:
    """Check that delta-rs knows the expressions of a table.

    Raises:
        SchemaError: it does not.
    """
    with row_checks(facts) as checks:
        checks.try_expressions()


def _plain(given: Any, column: str) -> Any:
    """A type as Delta keeps it, where everything may be null.

    Raises:
        SchemaError: Delta has no such type.
    """
    if types.is_timestamp(given):
        return pa.timestamp("us", None if given.tz is None else "UTC")
    if types.is_large_string(given) or types.is_string_view(given):
        return pa.string()
    if types.is_large_binary(given) or types.is_binary_view(given):
        return pa.binary()
    if types.is_struct(given):
        return pa.struct([pa.field(each.name, _plain(each.type, column)) for each in given])
    if types.is_map(given):
        return pa.map_(_plain(given.key_type, column), _plain(given.item_type, column))
    if types.is_list(given) or types.is_large_list(given):
        return pa.list_(pa.field("element", _plain(given.value_type, column)))
    taken = (types.is_boolean, types.is_signed_integer, types.is_string, types.is_binary, types.is_date32,
             types.is_float32, types.is_float64, types.is_decimal128)  # fmt: skip
    if not any(is_kind(given) for is_kind in taken):
        raise SchemaError(
            f"Column {column} has the type {given}, which Delta Lake does not know",
            next_step="cast it, for example to string or to a number",
        )
    return given


class RowChecks:
    """Checks the rows of a task.

    Args:
        scratch: a table of delta-rs with the expressions of the table; None: it has none.
    """

    def __init__(self, facts: TableFacts, scratch: Any) -> None:
        self._facts = facts
        self._fields = {each.name: each for each in facts.arrow}
        self._plain = {each.name: _plain(each.type, each.name) for each in facts.arrow}
        self._scratch = scratch
        self._sized = facts.sized

    def divided(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Refused]]:
        """The rows that the table takes, with its types; and the others."""
        found: dict[int, tuple[str, str]] = {}
        numbers, columns = np.arange(batch.num_rows), batch.schema.names
        for column in columns:
            _check(batch.column(column), self._fields[column], numbers, column, found)
            if column in self._sized:
                _check_length(batch.column(column), column, *self._sized[column], found)
        for column in self._facts.partition_by:
            if column in columns:
                _check_partition(batch.column(column), column, found)
        good = np.array([n not in found for n in range(batch.num_rows)], dtype=bool) if found else None
        if good is not None:
            batch, numbers = batch.filter(pa.array(good)), numbers[good]
        arrays = [_as(batch.column(name).cast(self._plain[name]), self._fields[name].type) for name in columns]
        taken = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([self._fields[name] for name in columns]))
        refused = [(number, *why) for number, why in found.items()]
        failed = self._refused_by_expressions(taken) if self._scratch is not None else []
        if failed:
            refused += [(int(numbers[number]), kind, text) for number, kind, text in failed]
            keep = np.ones(taken.num_rows, dtype=bool)
            keep[[number for number, _, _ in failed]] = False
            taken = taken.filter(pa.array(keep))
        for name in self._facts.partition_by:
            if name not in columns:  # files are divided by it all the same
                taken = taken.append_column(self._fields[name], pa.nulls(taken.num_rows, self._plain[name]))
        return taken, sorted(refused)

    def try_expressions(self) -> None:
        """Check that delta-rs knows the expressions.

        Raises:
            SchemaError: it does not.
        """
        if self._scratch is None:
            return
        try:
            self._write(self._all_columns(pa.RecordBatch.from_pylist([], pa.schema(self._plain))))
        except Exception as error:
            raise self._not_known(error) from error

    def _not_known(self, error: Exception) -> SchemaError:
        return SchemaError(
            f"delta-rs cannot check the constraints of the table in {self._facts.root}",
            detail=_in_short(error),
            next_step="write the constraint in another way, or use a table without it",
        )

    # ---- expressions ---------------------------------------------------------------------------------

    def _refused_by_expressions(self, batch: pa.RecordBatch) -> list[Refused]:
        """The rows that delta-rs does not take. A range that is refused is divided, until single rows are left."""
        rows = self._all_columns(batch)
        found: list[Refused] = []
        ranges = [(0, rows.num_rows)] if rows.num_rows else []
        while ranges:
            begin, end = ranges.pop()
            try:
                self._write(rows.slice(begin, end - begin))
            except OSError:
                raise  # the disk is full: no row is to blame
            except Exception as error:
                if _OS_ERROR.search(str(error)):  # likewise, as delta-rs says it
                    raise OSError(_in_short(error)) from error
                if end - begin == 1:
                    found.append((begin, "CheckViolation", self._reason(error)))
                else:
                    middle = (begin + end) // 2
                    ranges += [(middle, end), (begin, middle)]
        return found

    def _all_columns(self, batch: pa.RecordBatch) -> pa.Table:
        arrays = [
            batch.column(name).cast(kind) if name in batch.schema.names else pa.nulls(batch.num_rows, kind)
            for name, kind in self._plain.items()
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema(self._plain))

    def _write(self, rows: pa.Table) -> None:
        deltalake = load_deltalake()
        folder = Path(self._scratch.table_uri.removeprefix("file://"))
        try:
            deltalake.write_deltalake(self._scratch, rows, mode="append")
        finally:
            for path in folder.glob("*.parquet"):
                path.unlink(missing_ok=True)

    def _reason(self, error: Exception) -> str:
        if "failed validation check" not in str(error):
            return _in_short(error)
        asked = [f"{name}: {text}" for name, text in self._facts.constraints.items()]
        for name, metadata in self._facts.metadata.items():
            asked += [f"{name}: {metadata[key]}" for key in (_INVARIANT, _GENERATED) if key in metadata]
        return f"not all of this holds: {'; '.join(asked)}"


@contextlib.contextmanager
def row_checks(facts: TableFacts) -> Iterator[RowChecks]:
    """The checks of one task."""
    if not facts.has_expressions:
        yield RowChecks(facts, None)
        return
    deltalake = load_deltalake()
    with tempfile.TemporaryDirectory(prefix="onceflow-delta-") as folder:
        checks = RowChecks(facts, None)
        fields = [_without_not_null(each) for each in json.loads(facts.schema)["fields"]]
        schema = deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
        try:
            table = deltalake.DeltaTable.create(os.path.join(folder, "table"), schema)
            if facts.constraints:
                table.alter.add_constraint(dict(facts.constraints))
        except Exception as error:
            raise checks._not_known(error) from error
        yield RowChecks(facts, table)


def _without_not_null(given: Any) -> Any:
    """A field or type of Delta's JSON where everything may be null: that is checked before. Other metadata go."""
    if not isinstance(given, dict):
        return given
    made = {name: _without_not_null(each) for name, each in given.items() if name != "metadata"}
    if given.get("type") == "struct":
        made["fields"] = [_without_not_null(each) for each in given["fields"]]
    for name in ("nullable", "containsNull", "valueContainsNull"):
        if name in given:
            made[name] = True
    if "metadata" in given:
        made["metadata"] = {key: text for key, text in given["metadata"].items() if key in (_INVARIANT, _GENERATED)}
    return made


# ---- values ------------------------------------------------------------------------------------------


def _as(array: Any, kind: Any) -> Any:
    """The same values, with a type that says what must not be null. A cast of Arrow refuses the children of a null
    struct, which are null, too; and so do readers of files that do not say it."""
    if array.type == kind:
        return array
    if array.offset:
        array = array.take(pa.array(np.arange(len(array))))
    if types.is_struct(kind):
        children = [_as(array.field(number), each.type) for number, each in enumerate(kind)]
        buffers = array.buffers()[:1]
    elif types.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        parts = [_as(array.keys, kind.key_type), _as(array.items, kind.item_type)]
        children = [pa.Array.from_buffers(entries, len(parts[0]), [None], children=parts)]
        buffers = array.buffers()[:2]
    else:
        children = [_as(array.values, kind.value_type)]
        buffers = array.buffers()[:2]
    return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, children=children)


def _check(array: Any, given: Any, rows: Any, path: str, found: dict[int, tuple[str, str]]) -> None:
    """Find nulls where there must be none, and texts that are none, at any depth.

    Args:
        given: the field of the table. rows: number of the row of each value.
        found: gets the first problem of each row.
    """
    if array.null_count:
        valid = np.asarray(array.is_valid())
        if not given.nullable:
            _note(found, rows[~valid], "NotNullViolation", f"{path} must not be null")
        array, rows = array.filter(pa.array(valid)), rows[valid]
    kind = array.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        wrong = _not_utf8(array)
        if wrong is not None:
            _note(found, rows[wrong], "InvalidText", f"{path} is not valid UTF-8; readers could not read its file")
    elif types.is_struct(kind):
        for number, each in enumerate(given.type):
            _check(pc.struct_field(array, [number]), each, rows, f"{path}.{each.name}", found)
    elif types.is_map(kind):
        offsets = np.asarray(array.offsets)
        parents = np.repeat(rows, np.diff(offsets))
        begin, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        _check(array.keys.slice(begin, count), given.type.key_field, parents, f"{path}.key", found)
        _check(array.items.slice(begin, count), given.type.item_field, parents, f"{path}.value", found)
    elif types.is_list(kind) or types.is_large_list(kind):
        parents = rows[np.asarray(array.value_parent_indices())]
        _check(array.flatten(), given.type.value_field, parents, f"{path}.element", found)


def _not_utf8(array: Any) -> Any:
    """Numbers of the values that are no UTF-8; None: all are. Spark passes on the bytes of a record as they are."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return [n for n, value in enumerate(array.cast(pa.large_binary()).to_pylist()) if not _is_utf8(value)]
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_length(array: Any, column: str, kind: str, limit: int, found: dict[int, tuple[str, str]]) -> None:
    """Find strings of more characters than the column may have. Spark fills up those of a CHAR when it reads them."""
    lengths = pc.utf8_length(array).fill_null(0)
    for row in pc.indices_nonzero(pc.greater(lengths, limit)).to_pylist():
        found.setdefault(row, ("CheckViolation", f"{column} is {kind}, and has {lengths[row]} characters"))


def _check_partition(array: Any, column: str, found: dict[int, tuple[str, str]]) -> None:
    """Values that a partition column would give back as other ones."""
    rows = np.arange(len(array))
    if types.is_date(array.type):
        days = array.cast(pa.int32()).fill_null(0)
        wrong = np.asarray(pc.or_(pc.less(days, _FIRST_DAY), pc.greater(days, _LAST_DAY)))
        _note(found, rows[wrong], "InvalidPartitionValue", f"{column} is outside of the years 1 to 9999")
    elif types.is_string(array.type) or types.is_large_string(array.type):
        values = pa.array(["", NULL_PARTITION], array.type)
        wrong = np.asarray(pc.is_in(array.fill_null("valid"), value_set=values))
        text = f"{column} is '' or {NULL_PARTITION}: in a partition column, both would be read as null"
        _note(found, rows[wrong], "InvalidPartitionValue", text)


def _note(found: dict[int, tuple[str, str]], rows: Any, kind: str, text: str) -> None:
    for row in rows:
        found.setdefault(int(row), (kind, text))


def _in_short(error: Exception) -> str:
    return " ".join(str(error).partition("Preview of invalid data")[0].split())[:300]
