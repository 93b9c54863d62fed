"""Structs: a compact encoding of a fixed list of typed fields, for single dicts and for whole columns.

Layout, all little endian: first a bitmap of nulls (bit i: field i is null), then the fields in order of declaration
(each has a fixed width; for a string or binary field it is the length in four bytes), then the bytes of the string and
binary fields.
"""

from __future__ import annotations

import struct as _struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.api.whole_numbers import is_another

_FORMATS = {
    "bool": ("?", pa.bool_()),
    "int8": ("b", pa.int8()),
    "int16": ("h", pa.int16()),
    "int32": ("i", pa.int32()),
    "int64": ("q", pa.int64()),
    "uint8": ("B", pa.uint8()),
    "uint16": ("H", pa.uint16()),
    "uint32": ("I", pa.uint32()),
    "uint64": ("Q", pa.uint64()),
    "float32": ("f", pa.float32()),
    "float64": ("d", pa.float64()),
    "string": ("I", pa.string()),
    "binary": ("I", pa.binary()),
}
_ALIASES = {
    "int": "int64",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "str": "string",
    "bytes": "binary",
}
_EXACT_FLOATS = 1 << 24  # the smallest type of floats holds all whole numbers up to here
_NOTHING = pa.scalar(b"", pa.binary())


def struct(**fields: str) -> Struct:
    """A serde of dicts with declared fields.

    ::

        state = struct(balance="int64", count="int64", owner="string")

    Fields that are missing or None are null. Types: bool, int8 to int64, uint8 to uint64, float32, float64 (double),
    string, binary. The order of the fields is part of the format; to change fields, raise the processor's ``version``
    and decode the old bytes with the old struct in ``migrate``.

    Raises:
        ValueError: no fields, or an unknown type.
    """
    return Struct(fields)


class Struct:
    """See `struct`. It encodes dicts and columns of Arrow tables, both with the same result.

    Attributes:
        schema: the fields as an Arrow schema.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        if not fields:
            raise ValueError("a struct needs at least one field")
        unknown = [f"{name}={kind}" for name, kind in fields.items() if _ALIASES.get(kind, kind) not in _FORMATS]
        if unknown:
            raise ValueError(f"unknown field types: {', '.join(unknown)}; known: {', '.join(_FORMATS)}")
        self.fields = {name: _ALIASES.get(kind, kind) for name, kind in fields.items()}
        self.schema = pa.schema([(name, _FORMATS[kind][1]) for name, kind in self.fields.items()])
        self.name = f"struct({', '.join(f'{name}={kind}' for name, kind in self.fields.items())})"
        self._names = frozenset(self.fields)
        self._bitmap = (len(self.fields) + 7) // 8
        self._fixed = _struct.Struct("<" + "".join(_FORMATS[kind][0] for kind in self.fields.values()))
        self._width = self._bitmap + self._fixed.size
        self._plain = [(name, kind in ("string", "binary"), kind == "bool") for name, kind in self.fields.items()]
        self._long = [i for i, (_, long, _) in enumerate(self._plain) if long]
        self._reals = [i for i, kind in enumerate(self.fields.values()) if kind in ("float32", "float64")]
        self._zero = [False if flag else 0 for _, _, flag in self._plain]
        formats = ["<" + _FORMATS[kind][0] for kind in self.fields.values()]
        sizes = [_struct.calcsize(each) for each in formats]
        self._places = np.cumsum([self._bitmap, *sizes])[:-1].tolist()
        self._types = [np.dtype(each) for each in formats]

    def __repr__(self) -> str:
        return f"<serde {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Struct, (dict(self.fields),)

    # ---- one by one ----------------------------------------------------------------------------------

    def encode(self, value: Mapping[str, Any]) -> bytes:
        """Bytes of a dict.

        Raises:
            ValueError: unknown fields, or a value that its field cannot hold.
        """
        if not value.keys() <= self._names:
            raise ValueError(f"unknown fields {sorted(value.keys() - self._names)}: the struct has {list(self.fields)}")
        nulls, tail = 0, b""
        numbers: list[Any] = list(self._zero)
        for i, (name, long, flag) in enumerate(self._plain):
            item = value.get(name)
            if item is None:
                nulls |= 1 << i
            elif long:
                raw = _long_bytes(name, item, self.fields[name])
                numbers[i] = len(raw)
                tail += raw
            elif flag and not isinstance(item, (bool, np.bool_)):
                raise ValueError(f"field {name} is a bool, got {item!r}")
            else:
                numbers[i] = item
        try:
            fixed = self._fixed.pack(*numbers)
        except (_struct.error, OverflowError) as error:
            raise ValueError(f"{self.name} cannot hold {value!r}: {error}") from None
        for i in self._reals:
            if type(numbers[i]) is not float and _is_rounded(numbers[i], self._fixed, fixed, i):
                raise ValueError(f"{self.name} cannot hold {value!r}: {numbers[i]!r} would be another number")
        return nulls.to_bytes(self._bitmap, "little") + fixed + tail

    def decode(self, raw: bytes) -> dict[str, Any]:
        """The dict, with all fields.

        Raises:
            ValueError: bytes of another struct.
        """
        if len(raw) < self._width:
            raise ValueError(f"{len(raw)} bytes are not of {self.name}")
        numbers: list[Any] = list(self._fixed.unpack_from(raw, self._bitmap))
        at = self._width
        for i in self._long:
            end = at + numbers[i]
            part = raw[at:end]
            numbers[i] = part.decode() if self.fields[self._plain[i][0]] == "string" else bytes(part)
            at = end
        if at != len(raw):
            raise ValueError(f"{len(raw)} bytes are not of {self.name}")
        nulls = int.from_bytes(raw[: self._bitmap], "little")
        values = dict(zip(self.fields, numbers, strict=True))
        if nulls:
            for i, name in enumerate(self.fields):
                if nulls >> i & 1:
                    values[name] = None
        return values

    # ---- column by column ----------------------------------------------------------------------------

    def encode_columns(self, columns: Mapping[str, Any], count: int, prefix: bytes = b"") -> list[bytes]:
        """Bytes of every row.

        Args:
            columns: an Arrow array of ``schema``'s type for each field.
            count: rows.
            prefix: put in front of every row's bytes.
        """
        width = len(prefix) + self._width
        fixed = np.zeros((count, width), dtype=np.uint8)
        fixed[:, : len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
        tails = []
        for i, name in enumerate(self.fields):
            column = columns[name]
            if column.null_count:
                nulls = column.is_null().to_numpy(zero_copy_only=False)
                fixed[:, len(prefix) + i // 8] |= nulls.astype(np.uint8) << (i % 8)
            if i in self._long:
                column = column.cast(pa.binary())
                tails.append(column)
                column = pc.binary_length(column)
            if column.null_count:
                column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
            values = np.ascontiguousarray(column.to_numpy(zero_copy_only=False).astype(self._types[i]))
            at, size = len(prefix) + self._places[i], self._types[i].itemsize
            fixed[:, at : at + size] = values.view(np.uint8).reshape(count, size)
        blob = fixed.tobytes()
        if not tails:
            return [blob[at : at + width] for at in range(0, count * width, width)]
        heads = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, pa.py_buffer(blob)])
        joined = pc.binary_join_element_wise(
            heads.cast(pa.binary()), *tails, _NOTHING, null_handling="replace", null_replacement=""
        )
        rows: list[bytes] = joined.to_pylist()
        return rows

    def decode_columns(self, raws: Sequence[bytes], skip: int = 0) -> dict[str, Any]:
        """The fields of many rows as Arrow arrays.

        Args:
            raws: bytes of each row.
            skip: how many bytes to skip at the beginning of each row.

        Raises:
            ValueError: bytes of another struct.
        """
        count, width = len(raws), skip + self._width
        blob = np.frombuffer(b"".join(raws), dtype=np.uint8)
        lengths = np.fromiter(map(len, raws), dtype=np.int64, count=count)
        if count and lengths.min() < width:
            raise ValueError(f"{int(lengths.min()) - skip} bytes are not of {self.name}")
        starts = np.cumsum(lengths) - lengths
        fixed: npt.NDArray[np.uint8]
        if len(blob) == count * width:
            fixed = blob.reshape(count, width)
        else:
            fixed = blob[starts[:, None] + np.arange(width)]
        columns: dict[str, Any] = {}
        at = starts + width
        for i, (name, long, _) in enumerate(self._plain):
            place, kind = skip + self._places[i], self._types[i]
            # Take the columns of this field out of the uint8 matrix, and view them as the field's type.
            numbers = np.ascontiguousarray(fixed[:, place : place + kind.itemsize]).view(kind).reshape(count)
            nulls = (fixed[:, skip + i // 8] >> (i % 8) & 1).astype(bool)
            mask = nulls if nulls.any() else None
            if long:
                sizes = numbers.astype(np.int64)
                if (at + sizes > starts + lengths).any():
                    raise ValueError(f"bytes are not of {self.name}")
                columns[name] = _long_column(blob, at, sizes, mask, self.schema.field(name).type)
                at = at + sizes
            else:
                columns[name] = pa.array(numbers, type=self.schema.field(name).type, mask=mask)
        if (at != starts + lengths).any():
            raise ValueError(f"bytes are not of {self.name}")
        return columns


def _is_rounded(number: Any, form: _struct.Struct, raw: bytes, at: int) -> bool:
    """Whether a number has become another one in a field of floats, as when a column is cast."""
    if type(number) is int and -_EXACT_FLOATS <= number <= _EXACT_FLOATS:
        return False
    return is_another(number, form.unpack(raw)[at])


def _long_bytes(name: str, item: Any, kind: str) -> bytes:
    if kind == "string" and isinstance(item, str):
        return item.encode()
    if kind == "binary" and isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    raise ValueError(f"field {name} is a {kind}, got {item!r}")


def _long_column(
    blob: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_] | None,
    kind: Any,
) -> Any:
    """An Arrow array of slices of a blob."""
    ends = np.cumsum(sizes)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    offsets[1:] = ends
    where = np.repeat(at - (ends - sizes), sizes) + np.arange(int(ends[-1]) if len(ends) else 0)
    validity = None if mask is None else pa.array(~mask).buffers()[1]
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(blob[where]))]
    array = pa.Array.from_buffers(kind, len(sizes), buffers)
    if pa.types.is_string(kind):
        array.validate(full=True)  # UTF-8
    return array
