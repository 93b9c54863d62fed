"""Whole numbers and decimals beside floats, without a rounded one.

NumPy has no integer that is missing. So pandas makes floats of an integer column with nulls, and a float does not hold
every integer beyond 2^53. Two things prevent that such a number is stored: columns say that pandas has a type for them,
``Int64``, and a float that large does not become an integer again.

A whole number or a decimal becomes a float only if no whole number is rounded, and no finite number becomes infinite.
Fractions are rounded to the nearest float.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

_Columns = TypeVar("_Columns", pa.RecordBatch, pa.Table)

_PANDAS = b"pandas"  # the metadata that `to_pandas` reads
_FIRST_INEXACT = float(1 << 53)
# By the type of floats: all whole numbers up to here are floats, and all of so many digits.
_WHOLE_FLOATS = {16: (1 << 11, 3), 32: (1 << 24, 7), 64: (1 << 53, 15)}

#: What errors say next.
NEXT_STEP = (
    "keep whole numbers whole: to_pandas() of what onceflow gives has columns of the type Int64 where integers are "
    "missing; in columns of your own, use astype('Int64') before values are missing, or pyarrow"
)


def with_nullable_integers(given: _Columns) -> _Columns:
    """The columns, of which ``to_pandas`` makes ``Int64`` and the like where integers are missing."""
    columns = []
    for at, field in enumerate(given.schema):
        if pa.types.is_integer(field.type) and given.column(at).null_count:
            kind = str(field.type)  # uint8
            name = f"UInt{kind[4:]}" if kind[0] == "u" else f"Int{kind[3:]}"
            of_field = {"name": field.name, "field_name": field.name, "pandas_type": kind, "numpy_type": name}
            columns.append({**of_field, "metadata": None})
    if not columns:
        return given
    described = json.dumps({"index_columns": [], "column_indexes": [], "columns": columns}).encode()
    return given.replace_schema_metadata({**(given.schema.metadata or {}), _PANDAS: described})


def rounded(column: Any, kind: pa.DataType) -> float | None:
    """A float that is to become a whole number or a decimal, and is so large that it may have been another one.

    Args:
        column: an Arrow array, maybe of lists, structs or maps.
        kind: the type that it is to become.

    Returns:
        The first one; None: there is none.
    """
    found: float | None = _first(column, kind, _rounded)
    return found


def changed(column: Any, kind: pa.DataType) -> float | Decimal | None:
    """A number that a cast would make another one, which Arrow does not refuse: a float with more digits than a decimal
    type has; a whole decimal that is none of the floats; one in whose place a type of floats has infinity. That a type
    of floats has fewer digits for a fraction does not count.

    Args, returns: as `rounded`.
    """
    found: float | Decimal | None = _first(column, kind, _changed)
    return found


def is_another(number: Any, real: float) -> bool:
    """Whether a number that is no float has become another one as this float. That a fraction is rounded does not
    count."""
    if math.isinf(real):
        return bool(number != real)
    if isinstance(number, Integral):  # of NumPy, which would compare them as floats
        return int(number) != real
    if isinstance(number, Decimal):
        return number.is_finite() and number == number.to_integral_value() and number != real
    return isinstance(number, Fraction) and number.denominator == 1 and number != real


def cast(column: Any, kind: pa.DataType) -> Any:
    """As ``column.cast``, but a decimal becomes the nearest float. Arrow makes 62.190000000000005 of 62.19.

    To be called when `changed` finds nothing.
    """
    return column.cast(_with_texts(column.type, kind)).cast(kind)


def _with_texts(given: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of decimals that are to become floats, at any depth."""
    if pa.types.is_decimal(given):
        return pa.string() if pa.types.is_floating(kind) else given
    if pa.types.is_struct(given) and pa.types.is_struct(kind):
        fields = [given.field(at) for at in range(given.num_fields)]
        wanted = {name: kind.field(name).type for name in kind.names if kind.get_field_index(name) >= 0}
        inner = [_with_texts(each.type, wanted.get(each.name, each.type)) for each in fields]
        if inner != [each.type for each in fields]:
            return pa.struct([each.with_type(made) for each, made in zip(fields, inner, strict=True)])
    elif pa.types.is_map(given) and pa.types.is_map(kind):
        pair = _with_texts(given.key_type, kind.key_type), _with_texts(given.item_type, kind.item_type)
        return given if pair == (given.key_type, given.item_type) else pa.map_(*pair)
    elif hasattr(given, "value_type") and hasattr(kind, "value_type"):
        made = _with_texts(given.value_type, kind.value_type)
        if made != given.value_type:
            field = given.value_field.with_type(made)
            if pa.types.is_fixed_size_list(given):
                return pa.list_(field, given.list_size)
            return pa.large_list(field) if pa.types.is_large_list(given) else pa.list_(field)
    return given


_Find = Callable[[Any, pa.DataType], "float | Decimal | None"]


def _first(column: Any, kind: pa.DataType, find: _Find) -> Any:
    """What ``find`` finds first in a column of floats or decimals, or in such a part of it."""
    given = column.type
    if pa.types.is_dictionary(given):
        return _first(column.dictionary, kind, find)
    if pa.types.is_floating(given) or pa.types.is_decimal(given):
        return find(column, kind)
    pairs: list[tuple[Any, Any]] = []
    if pa.types.is_struct(given) and pa.types.is_struct(kind):
        names = [given.field(at).name for at in range(given.num_fields)]
        pairs = [
            (pc.struct_field(column, [at]), kind.field(name).type)
            for at, name in enumerate(names)
            if kind.get_field_index(name) >= 0
        ]
    elif pa.types.is_map(given) and pa.types.is_map(kind):
        pairs = [(column.keys, kind.key_type), (column.items, kind.item_type)]
    elif hasattr(given, "value_type") and hasattr(kind, "value_type"):
        pairs = [(column.flatten(), kind.value_type)]
    return next((found for pair in pairs if (found := _first(*pair, find)) is not None), None)


def _rounded(column: Any, kind: pa.DataType) -> float | None:
    if pa.types.is_decimal(column.type) or not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        return None
    values = column.cast(pa.float64())
    large = values.filter(pc.and_(pc.is_finite(values), pc.greater_equal(pc.abs(values), _FIRST_INEXACT)))
    return float(large[0].as_py()) if len(large) else None


def _changed(column: Any, kind: pa.DataType) -> float | Decimal | None:
    if pa.types.is_decimal(column.type):
        return _no_float(column, kind) if pa.types.is_floating(kind) else None
    if pa.types.is_decimal(kind):
        texts = column.cast(pa.string())  # a float stands for the number of its fewest digits
        try:
            texts.cast(kind)
        except pa.ArrowInvalid:
            for text, value in zip(texts.to_pylist(), column.to_pylist(), strict=True):
                # The cast of floats refuses NaN, and what is too large.
                if value is not None and math.isfinite(value) and _places(text) > kind.scale:
                    return float(value)
        return None
    if pa.types.is_floating(kind) and kind.bit_width < column.type.bit_width:
        other = column.filter(pc.and_(pc.is_finite(column), pc.invert(pc.is_finite(column.cast(kind)))))
        return float(other[0].as_py()) if len(other) else None
    return None


def _no_float(column: Any, kind: pa.DataType) -> Decimal | None:
    limit, digits = _WHOLE_FLOATS[kind.bit_width]
    if column.type.precision - column.type.scale <= digits:
        return None
    # Arrow's cast is not quite exact.
    large = column.filter(pc.greater_equal(pc.abs(column.cast(pa.float64())), limit * 0.999))
    for value, real in zip(large.to_pylist(), large.cast(pa.string()).cast(kind).to_pylist(), strict=True):
        if is_another(value, float(real)):
            assert isinstance(value, Decimal)
            return value
    return None


def _places(text: str) -> int:
    """How many digits behind the point a number has; negative: so many zeros are at its end."""
    exponent = Decimal(text).normalize().as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return -exponent
