"""Reads Avro values in their plain form, for columns: with the schema that wrote them, and checked at the same time.

It is faster than a look by `avro_check` and a call of fastavro. Types that refer to themselves are none of columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from onceflow.schema_registry.avro_check import INT_BITS, INT_BYTES, LONG_BITS, LONG_BYTES, MORE, check_number
from onceflow.schema_registry.avro_defaults import Default
from onceflow.schema_registry.avro_names import branch_name, logical_of

#: The value that begins at a place, and where it ends. It raises ValueError, IndexError and EOFError.
Read = Callable[[bytes, int], tuple[Any, int]]

_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")


def plain_reader(schema: Any, named: Mapping[str, Any]) -> Callable[[bytes, int], Any]:
    """A function that reads the value in the bytes from a place on.

    It raises ValueError for bytes that are no value, and EOFError if they end too early.

    Args:
        schema: see `avro_schema.py`. named: its types by their full names; none refers to itself.
    """
    read = _Readers(named).of(schema)

    def whole(raw: bytes, at: int) -> Any:
        try:
            found, end = read(raw, at)
        except (IndexError, struct.error):
            raise EOFError from None
        if end == len(raw):
            return found
        if end > len(raw):
            raise EOFError
        raise ValueError(f"{len(raw) - end} bytes follow the value")

    return whole


def resolved_reader(writer: Any, reader: Any) -> Callable[[bytes, int], Any] | None:
    """As `plain_reader`, with the fields of another schema; None: fields have changed in a way that fastavro has to
    resolve. Fields that were added or left out, and all that says nothing of values, such as ``doc``, are no such way.

    Args:
        writer, reader: `AvroSchema` objects.
    """
    read = writer.read_plain
    roots = writer.root, reader.root
    if read is None or reader.is_recursive or not all(isinstance(r, dict) and r["type"] == "record" for r in roots):
        return None
    if roots[0]["name"] != roots[1]["name"]:
        return None
    given = {field["name"]: _bare(field["type"], writer.named) for field in roots[0]["fields"]}
    taken, added = [], []
    for field in roots[1]["fields"]:
        name = field["name"]
        if name in given and given[name] == _bare(field["type"], reader.named):
            taken.append(name)
        elif name not in given and "default" in field and not field.get("aliases"):
            added.append((name, Default(field["type"], field["default"], reader.named, plain=True)))
        else:
            return None

    def resolved(raw: bytes, at: int) -> Any:
        found = read(raw, at)
        made = {name: found[name] for name in taken}
        for name, default in added:
            made[name] = default.value()
        return made

    return resolved


def _bare(schema: Any, named: Mapping[str, Any]) -> Any:
    """What of a type decides how its values are read."""
    if isinstance(schema, list):
        return [_bare(each, named) for each in schema]
    kind = schema if isinstance(schema, str) else schema["type"]
    if not isinstance(kind, str):
        return _bare(kind, named)
    if kind in named:
        return _bare(named[kind], named)
    found: dict[str, Any] = {"type": kind}
    if isinstance(schema, dict):
        found |= {
            key: schema[key]
            for key in ("name", "size", "symbols", "logicalType", "precision", "scale")
            if key in schema
        }
        found |= {key: _bare(schema[key], named) for key in ("items", "values") if key in schema}
        if "fields" in schema:
            found["fields"] = [(field["name"], _bare(field["type"], named)) for field in schema["fields"]]
    return found


class _Readers:
    """Makes the functions of a schema."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named

    def of(self, schema: Any) -> Read:
        if isinstance(schema, list):
            return _union([(branch_name(each), self.of(each)) for each in schema], self._named)
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind in self._named:
            return self.of(self._named[kind])
        if kind in ("record", "error"):
            return _record([(field["name"], self.of(field["type"])) for field in schema["fields"]])
        if kind == "array":
            return _items(self.of(schema["items"]))
        if kind == "map":
            return _entries(self.of(schema["values"]))
        if kind == "enum":
            return _enum(schema["symbols"])
        read = _fixed(schema["size"]) if kind == "fixed" else _PRIMITIVES[kind]
        return _decimal(read, schema.get("scale", 0)) if logical_of(schema) == "decimal" else read


def _record(fields: list[tuple[str, Read]]) -> Read:
    """Short texts and numbers of one byte need no call."""
    kinds = [(name, read, read is _string, read is _long or read is _int) for name, read in fields]

    def record(raw: bytes, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        for name, read, is_text, is_number in kinds:
            if is_text and not (byte := raw[at]) & 0x81:
                end = at + 1 + (byte >> 1)
                found[name] = raw[at + 1 : end].decode()
                at = end
            elif is_number and (byte := raw[at]) < MORE:
                found[name] = (byte >> 1) ^ -(byte & 1)
                at += 1
            else:
                found[name], at = read(raw, at)
        return found, at

    return record


def _null(raw: bytes, at: int) -> tuple[None, int]:
    return None, at


def _boolean(raw: bytes, at: int) -> tuple[bool, int]:
    if raw[at] > 1:
        raise ValueError(f"a boolean is {raw[at]}")
    return raw[at] == 1, at + 1


def _int(raw: bytes, at: int) -> tuple[int, int]:
    return check_number(raw, at, INT_BYTES, INT_BITS)


def _long(raw: bytes, at: int) -> tuple[int, int]:
    return check_number(raw, at, LONG_BYTES, LONG_BITS)


def _float(raw: bytes, at: int) -> tuple[float, int]:
    return _FLOAT.unpack_from(raw, at)[0], at + 4


def _double(raw: bytes, at: int) -> tuple[float, int]:
    return _DOUBLE.unpack_from(raw, at)[0], at + 8


def _bytes(raw: bytes, at: int) -> tuple[bytes, int]:
    size, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
    if size < 0:
        raise ValueError(f"a length is {size}")
    end = at + size
    if end > len(raw):
        raise EOFError
    return raw[at:end], end


def _string(raw: bytes, at: int) -> tuple[str, int]:
    found, at = _bytes(raw, at)
    return found.decode(), at


def _fixed(size: int) -> Read:
    def fixed(raw: bytes, at: int) -> tuple[bytes, int]:
        end = at + size
        if end > len(raw):
            raise EOFError
        return raw[at:end], end

    return fixed


def _decimal(read: Read, scale: int) -> Read:
    def decimal(raw: bytes, at: int) -> tuple[Decimal, int]:
        found, at = read(raw, at)
        number = int.from_bytes(found, "big", signed=True)
        return Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale)), at

    return decimal


def _enum(symbols: list[str]) -> Read:
    def enum(raw: bytes, at: int) -> tuple[str, int]:
        symbol, at = check_number(raw, at, INT_BYTES, INT_BITS)
        if not 0 <= symbol < len(symbols):
            raise ValueError(f"an enum has no symbol {symbol}")
        return symbols[symbol], at

    return enum


def _union(branches: list[tuple[str, Read]], named: Mapping[str, Any]) -> Read:
    """A value of a type with a name is a pair of both."""
    made = [(name if name in named else None, read) for name, read in branches]
    quick = {2 * at: branch for at, branch in enumerate(made[:64])}  # by the byte that says which

    def union(raw: bytes, at: int) -> tuple[Any, int]:
        branch = quick.get(raw[at])
        if branch is None:
            number, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
            if not 0 <= number < len(made):
                raise ValueError(f"a union has no type {number}")
            branch, at = made[number], at - 1
        name, read = branch
        if name is None:
            return read(raw, at + 1)
        found, at = read(raw, at + 1)
        return (name, found), at

    return union


def _blocks(raw: bytes, at: int) -> tuple[int, int, int | None]:
    """How many items follow, where they begin, and where they end, if that is said."""
    count, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
    end = None
    if count < 0:
        size, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
        count, end = -count, at + size
    if count > len(raw) - at:  # each needs a byte at least
        raise EOFError
    return count, at, end


def _check_end(at: int, end: int | None) -> None:
    if end is not None and at != end:
        raise ValueError(f"a block of items ends at byte {at}, and says {end}")


def _items(read: Read) -> Read:
    def items(raw: bytes, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            count, at, end = _blocks(raw, at)
            if not count:
                return found, at
            for _ in range(count):
                item, at = read(raw, at)
                found.append(item)
            _check_end(at, end)

    return items


def _entries(read: Read) -> Read:
    def entries(raw: bytes, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while True:
            count, at, end = _blocks(raw, at)
            if not count:
                return found, at
            for _ in range(count):
                key, at = _string(raw, at)
                found[key], at = read(raw, at)
            _check_end(at, end)

    return entries


_PRIMITIVES: dict[str, Read] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _float,
    "double": _double,
    "bytes": _bytes,
    "string": _string,
}
