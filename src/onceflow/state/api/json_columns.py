"""JSON for column processors: converts documents to typed columns and back, without a Python loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from onceflow.state.api.user_errors import shown
from onceflow.state.api.whole_numbers import with_nullable_integers

_NEWLINE = pa.scalar("\n", pa.string())
_NOTHING = pa.scalar("", pa.string())
_BLOCK_MAX = (1 << 31) - 1


class JsonRowError(ValueError):
    """A row is not a JSON object with the expected fields, or a value cannot be written as JSON.

    Attributes:
        index: index of the row, counted from 0.
        reason: what is wrong with it.
        document: the row that was read; None if the error is about writing.
    """

    def __init__(self, index: int, reason: str, document: bytes | None = None) -> None:
        self.index = index
        self.reason = reason
        self.document = document
        super().__init__(
            f"row {index}: {reason}" if document is None else f"row {index}: {reason}; it is {shown(document)}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonRowError, (self.index, self.reason, self.document)


def parse_json(values: Any, schema: pa.Schema) -> pa.Table:
    """Columns of JSON objects, one object in each value.

    ::

        parsed = parse_json(records["value"], pa.schema([("account", pa.string()), ("amount", pa.int64())]))

    Args:
        values: an Arrow array of bytes or text; a null gives a row of nulls.
        schema: fields to read and their types; other fields are ignored, missing ones are null.

    Raises:
        JsonRowError: for the first row that is not a JSON object, or has a field of another type.
    """
    column = pc.cast(values, values.type).combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not len(column):
        return schema.empty_table()
    if not len(schema):
        raise ValueError("parse_json needs at least one field")
    if column.null_count:
        column = column.fill_null("{}" if _is_text(column.type) else b"{}")
    text = _as_text(column)
    if text is None or not _is_regular(text):
        text = _made_regular(column)
    table = _read(text, schema)
    if table is None:
        index = _first_bad(text, schema, 0, len(text))
        try:
            pj.read_json(_lines(text.slice(index, 1)), parse_options=_options(schema))
            reason = "not read as one object"
        except pa.ArrowException as error:
            reason = str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        raise _bad(column, index, reason)
    for field in schema:
        at = _first_not_finite(table[field.name])
        if at is not None:  # the reader accepts NaN and numbers that are too large
            raise _bad(column, at, f"{field.name} is not a finite number")
    return with_nullable_integers(table)


def format_json(table: pa.Table) -> pa.Array:
    """JSON objects in bytes, one for each row.

    ::

        outputs = pa.table({"key": states["key"], "value": format_json(new_states.select(["balance", "count"]))})

    Args:
        table: columns of integers, floats, decimals, booleans and text (bytes: UTF-8); nulls become ``null``.

    Raises:
        JsonRowError: NaN or infinity, which do not exist in JSON.
        TypeError: a column of another type.
    """
    parts: list[Any] = []
    for i, name in enumerate(table.column_names):
        parts.append(pa.scalar(("{" if not i else ",") + json.dumps(name) + ":", pa.string()))
        column = table[name]
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        parts.append(_formatted(column, name))
    if not parts:
        return pa.array([b"{}"] * table.num_rows, pa.binary())
    parts.append(pa.scalar("}", pa.string()))
    return pc.binary_join_element_wise(*parts, _NOTHING).cast(pa.binary())


# ---- reading -----------------------------------------------------------------------------------------


def _first_not_finite(column: Any) -> int | None:
    """The first row with a float that is no number, also inside of lists and structs; None: there is none."""
    kind = column.type
    if pa.types.is_floating(kind):
        at = pc.index(pc.is_finite(column), False).as_py()
        return None if at < 0 else int(at)
    if not pa.types.is_nested(kind):
        return None
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_struct(kind):
        found = [_first_not_finite(part) for part in array.flatten()]
        return min((at for at in found if at is not None), default=None)
    at = _first_not_finite(array.flatten())
    return None if at is None else int(pc.list_parent_indices(array)[at].as_py())


def _bad(column: Any, index: int, reason: str) -> JsonRowError:
    document = column[index].as_py()
    return JsonRowError(index, reason, document.encode() if isinstance(document, str) else document)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_text(column: Any) -> Any:
    """The column as text; None if not all of it is UTF-8."""
    try:
        return column if column.type == pa.string() else column.cast(pa.string())
    except pa.ArrowInvalid:
        return None


def _is_regular(text: Any) -> bool:
    """Whether the rows can be joined by newlines, so that the reader finds exactly one object in each row.

    The reader accepts several objects in one line and objects over several lines, and skips empty lines. Suppose that
    every row begins with an opening brace, ends with a closing brace, and has no line break. Then no object can span
    two rows, because inside an object or list a closing brace is never followed by an opening one. So every row
    contains at least one object. If there are as many objects as rows, every row contains exactly one.
    """
    _, offsets, data = text.buffers()
    if data is None:
        return False
    where = np.frombuffer(offsets, dtype=np.int32)[text.offset : text.offset + len(text) + 1]
    raw = np.frombuffer(data, dtype=np.uint8)[where[0] : where[-1]]
    if not len(raw) or (np.diff(where) < 2).any():
        return False
    if (raw[where[:-1] - where[0]] != ord("{")).any() or (raw[where[1:] - where[0] - 1] != ord("}")).any():
        return False
    return not ((raw == ord("\n")) | (raw == ord("\r"))).any()


def _made_regular(column: Any) -> Any:
    """The rows without surrounding white space, and without line breaks in them.

    Raises:
        JsonRowError: a row is not a JSON object.
    """
    texts = []
    for i, raw in enumerate(column.to_pylist()):
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _bad(column, i, str(error)) from None
        if not isinstance(value, dict):
            raise _bad(column, i, f"an object is expected, got {type(value).__name__}")
        text = raw if isinstance(raw, str) else raw.decode()
        # In valid JSON, line breaks are only white space: inside strings they are escaped.
        texts.append(text.strip().replace("\n", " ").replace("\r", " "))
    return pa.array(texts, pa.string())


def _options(schema: pa.Schema) -> pj.ParseOptions:
    return pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")


def _lines(text: Any) -> pa.BufferReader:
    joined = pc.binary_join_element_wise(text, _NOTHING, _NEWLINE)
    _, offsets, data = joined.buffers()
    where = np.frombuffer(offsets, dtype=np.int32)[joined.offset : joined.offset + len(joined) + 1]
    return pa.BufferReader(data.slice(int(where[0]), int(where[-1] - where[0])))


def _read(text: Any, schema: pa.Schema) -> pa.Table | None:
    """The columns; None when a row is bad."""
    lines = _lines(text)
    # One block: a row must not be longer than a block.
    block = min(max(lines.size(), 1 << 16) + 1, _BLOCK_MAX)
    options = pj.ReadOptions(use_threads=False, block_size=block)
    try:
        table = pj.read_json(lines, read_options=options, parse_options=_options(schema))
    except pa.ArrowException:
        return None
    return table.select(schema.names).cast(schema) if len(table) == len(text) else None


def _first_bad(text: Any, schema: pa.Schema, start: int, end: int) -> int:
    """Index of the first row that cannot be read. There must be one between start and end."""
    while end - start > 1:
        middle = (start + end) // 2
        if _read(text.slice(start, middle - start), schema) is None:
            end = middle
        else:
            start = middle
    return start


# ---- writing -----------------------------------------------------------------------------------------


def _formatted(column: Any, name: str) -> Any:
    """JSON texts of a column's values."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_floating(kind):
        if not pc.all(pc.is_finite(column), min_count=0).as_py():
            bad = pc.index(pc.is_finite(column), False).as_py()
            raise JsonRowError(bad, f"{name} is {column[bad].as_py()}, which does not exist in JSON")
        text = column.cast(pa.string())
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        text = column.cast(pa.string())
    elif pa.types.is_null(kind):
        return pa.array(["null"] * len(column), pa.string())
    elif _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        quote = pa.scalar('"', pa.string())
        text = pc.binary_join_element_wise(quote, _escaped(column.cast(pa.string())), quote, _NOTHING)
    else:
        raise TypeError(f"column {name} has type {kind}; JSON can contain numbers, booleans and text")
    return text.fill_null("null") if text.null_count else text


def _escaped(text: Any) -> Any:
    _, offsets, data = text.buffers()
    if data is None:
        return text
    where = np.frombuffer(offsets, dtype=np.int32)
    raw = np.frombuffer(data, dtype=np.uint8)[where[text.offset] : where[text.offset + len(text)]]
    if not ((raw < 0x20) | (raw == ord('"')) | (raw == ord("\\"))).any():
        return text
    text = pc.replace_substring(text, "\\", "\\\\")
    text = pc.replace_substring(text, '"', '\\"')
    for code in np.unique(raw[raw < 0x20]).tolist():
        text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return text
