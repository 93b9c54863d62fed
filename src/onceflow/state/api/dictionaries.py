"""Columns that user code returns with dictionaries, such as pandas' and Polars' categories, as plain columns.

Arrow cannot decode a dictionary of string views, which is what Polars gives as ``Categorical`` and ``Enum``, and casts
no dictionary inside of a list or a struct.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds


def decoded(column: Any) -> Any:
    """The column without dictionaries, also in structs, maps and lists; not in list views, which Arrow casts wrongly.

    Of views it has their texts or bytes. Lists of a fixed size become lists.
    """
    if not _has_dictionary(column.type):
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([decoded(each) for each in column.chunks or [pa.nulls(0, column.type)]])
    kind = column.type
    if kinds.is_dictionary(kind):
        values = decoded(column.dictionary)
        if kinds.is_string_view(values.type) or kinds.is_binary_view(values.type):
            values = values.cast(pa.large_string() if kinds.is_string_view(values.type) else pa.large_binary())
        return pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if kinds.is_struct(kind):
        parts = [decoded(column.field(at)) for at in range(kind.num_fields)]
        fields = [kind.field(at).with_type(part.type) for at, part in enumerate(parts)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
    if kinds.is_fixed_size_list(kind):
        return decoded(column.cast(pa.list_(kind.value_field)))
    if kinds.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        listed = decoded(column.cast(pa.list_(entries)))
        keys, items = listed.values.flatten()
        return pa.MapArray.from_arrays(listed.offsets, keys, items, mask=column.is_null())
    values = decoded(column.flatten())  # without what null lists have
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(column), 0))
    offsets = pa.concat_arrays([pa.array([0], ends.type), ends])
    made = pa.LargeListArray if kinds.is_large_list(kind) else pa.ListArray
    return made.from_arrays(offsets, values, mask=column.is_null())


def _has_dictionary(kind: pa.DataType) -> bool:
    if kinds.is_struct(kind):
        return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))
    if kinds.is_map(kind):
        return _has_dictionary(kind.key_type) or _has_dictionary(kind.item_type)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return _has_dictionary(kind.value_type)
    return bool(kinds.is_dictionary(kind))
