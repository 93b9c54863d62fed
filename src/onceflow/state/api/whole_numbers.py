"""Whole numbers in columns that user code turns into pandas and back, without a rounded one.

NumPy has no integer that is missing. So pandas makes floats of an integer column with nulls, and a float does not hold
every integer beyond 2^53. Two things prevent that such a number is stored: columns say that pandas has a type for them,
``Int64``, and a float that large does not become an integer again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

_Columns = TypeVar("_Columns", pa.RecordBatch, pa.Table)

_PANDAS = b"pandas"  # the metadata that `to_pandas` reads
_FIRST_INEXACT = float(1 << 53)

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
    return _first(column, kind, _rounded)


def changed(column: Any, kind: pa.DataType) -> float | None:
    """A float that a cast would make another number, which Arrow does not refuse: it has more digits than a decimal
    type, or a smaller type of floats has infinity in its place. That a smaller type has fewer digits does not count.

    Args, returns: as `rounded`.
    """
    return _first(column, kind, _changed)


_Find = Callable[[Any, pa.DataType], "float | None"]


def _first(column: Any, kind: pa.DataType, find: _Find) -> float | None:
    """What ``find`` finds first in a column of floats, or in such a part of it."""
    given = column.type
    if pa.types.is_dictionary(given):
        return _first(column.dictionary, kind, find)
    if pa.types.is_floating(given):
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
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        return None
    values = column.cast(pa.float64())
    large = values.filter(pc.and_(pc.is_finite(values), pc.greater_equal(pc.abs(values), _FIRST_INEXACT)))
    return float(large[0].as_py()) if len(large) else None


def _changed(column: Any, kind: pa.DataType) -> float | None:
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


def _places(text: str) -> int:
    """How many digits behind the point a number has; negative: so many zeros are at its end."""
    exponent = Decimal(text).normalize().as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return -exponent
