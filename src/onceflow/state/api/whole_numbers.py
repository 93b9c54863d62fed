"""Whole numbers in columns that user code turns into pandas and back, without a rounded one.

NumPy has no integer that is missing. So pandas makes floats of an integer column with nulls, and a float does not hold
every integer beyond 2^53. Two things prevent that such a number is stored: columns say that pandas has a type for them,
``Int64``, and a float that large does not become an integer again.
"""

from __future__ import annotations

import json
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
    given = column.type
    if pa.types.is_dictionary(given):
        return rounded(column.dictionary, kind)
    if pa.types.is_floating(given):
        if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
            return None
        values = column.cast(pa.float64())
        large = values.filter(pc.and_(pc.is_finite(values), pc.greater_equal(pc.abs(values), _FIRST_INEXACT)))
        return float(large[0].as_py()) if len(large) else None
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
    return next((found for pair in pairs if (found := rounded(*pair)) is not None), None)
