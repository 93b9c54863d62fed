"""Whether bytes are a value of an Avro schema: fastavro reads some that are none.

It takes -1 for the last type of a union and the last symbol of an enum, 5 for true, a number beyond 32 bits for an int,
and a number with more bytes than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Where the value ends that begins at a place. It raises ValueError, IndexError and EOFError.
Check = Callable[[bytes, int], int]

MORE = 0x80
INT_BYTES, LONG_BYTES = 5, 10
INT_BITS, LONG_BITS = 32, 64
_SIZES = {"float": 4, "double": 8}


def check_of(schema: Any, named: Mapping[str, Any]) -> Callable[[bytes, int], None]:
    """A function that checks the bytes from a place on.

    It raises ValueError for bytes that are no value, and EOFError if they end too early.

    Args:
        schema: see `avro_schema.py`. named: its types by their full names.
    """
    check = _Checks(named).of(schema)

    def whole(raw: bytes, at: int) -> None:
        try:
            end = check(raw, at)
        except IndexError:
            raise EOFError from None
        if end != len(raw):
            if end > len(raw):
                raise EOFError
            raise ValueError(f"{len(raw) - end} bytes follow the value")

    return whole


class _Checks:
    """Makes the functions of a schema. A type with a name has one, also if it refers to itself."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._made: dict[str, list[Check]] = {}

    def of(self, schema: Any) -> Check:
        if isinstance(schema, list):
            return _union([self.of(each) for each in schema])
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind in self._named:
            return self._of_name(kind)
        if kind == "array":
            return _blocks(self.of(schema["items"]))
        if kind == "map":
            return _blocks(_record([_bytes, self.of(schema["values"])]))
        if isinstance(schema, dict) and schema.get("name") in self._named:
            return self._of_name(schema["name"])
        return _PRIMITIVES.get(kind) or _fixed(_SIZES[kind])

    def _of_name(self, name: str) -> Check:
        if name in self._made:
            holder = self._made[name]
            return lambda raw, at: holder[0](raw, at)
        holder = self._made[name] = []
        schema = self._named[name]
        if schema["type"] == "enum":
            holder.append(_enum(len(schema["symbols"])))
        elif schema["type"] == "fixed":
            holder.append(_fixed(schema["size"]))
        else:
            holder.append(_record([self.of(field["type"]) for field in schema["fields"]]))
        return holder[0]


def check_number(raw: bytes, at: int, most: int, bits: int) -> tuple[int, int]:
    """An int or a long, and where it ends."""
    byte = raw[at]
    if byte < MORE:
        return (byte >> 1) ^ -(byte & 1), at + 1
    found, shift, begin = byte & 0x7F, 7, at
    while byte >= MORE:
        at += 1
        if at - begin == most:
            raise ValueError(f"a number has more than {most} bytes")
        byte = raw[at]
        found |= (byte & 0x7F) << shift
        shift += 7
    if not byte:
        raise ValueError("a number has more bytes than it needs")
    if found >> bits:
        raise ValueError(f"a number is beyond {bits} bits")
    return (found >> 1) ^ -(found & 1), at + 1


def _int(raw: bytes, at: int) -> int:
    begin = at
    while raw[at] >= MORE:
        at += 1
    if at > begin and (at - begin > 3 or not raw[at]):  # else it fits
        return check_number(raw, begin, INT_BYTES, INT_BITS)[1]
    return at + 1


def _long(raw: bytes, at: int) -> int:
    begin = at
    while raw[at] >= MORE:
        at += 1
    if at > begin and (at - begin > 8 or not raw[at]):
        return check_number(raw, begin, LONG_BYTES, LONG_BITS)[1]
    return at + 1


def _boolean(raw: bytes, at: int) -> int:
    if raw[at] > 1:
        raise ValueError(f"a boolean is {raw[at]}")
    return at + 1


def _bytes(raw: bytes, at: int) -> int:
    size = raw[at]
    if size < MORE:
        size, at = (size >> 1) ^ -(size & 1), at + 1
    else:
        size, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
    if size < 0:
        raise ValueError(f"a length is {size}")
    if size > len(raw) - at:
        raise EOFError
    return at + size


def _fixed(size: int) -> Check:
    def fixed(raw: bytes, at: int) -> int:
        if at + size > len(raw):
            raise EOFError
        return at + size

    return fixed


def _enum(count: int) -> Check:
    quick = frozenset(range(0, 2 * min(count, 64), 2))  # the bytes of most symbols

    def enum(raw: bytes, at: int) -> int:
        if raw[at] in quick:
            return at + 1
        symbol, at = check_number(raw, at, INT_BYTES, INT_BITS)
        if not 0 <= symbol < count:
            raise ValueError(f"an enum has no symbol {symbol}")
        return at

    return enum


def _union(checks: list[Check]) -> Check:
    count = len(checks)
    quick = {2 * branch: check for branch, check in enumerate(checks[:64])}  # by the byte that says which

    def union(raw: bytes, at: int) -> int:
        if (found := quick.get(raw[at])) is not None:
            return found(raw, at + 1)
        branch, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
        if not 0 <= branch < count:
            raise ValueError(f"a union has no type {branch}")
        return checks[branch](raw, at)

    return union


def _record(checks: list[Check]) -> Check:
    """Numbers and lengths of one byte, which most are, need no call. What ends beyond the bytes is found at the end."""

    def record(raw: bytes, at: int) -> int:
        for check in checks:
            if check is _bytes and not (byte := raw[at]) & 0x81:
                at += 1 + (byte >> 1)
            elif (check is _long or check is _int) and raw[at] < MORE:
                at += 1
            else:
                at = check(raw, at)
        return at

    return record


def _blocks(check: Check) -> Check:
    """Items in blocks, each with their number in front, and maybe the number of bytes. An item needs one at least."""

    def blocks(raw: bytes, at: int) -> int:
        while True:
            count, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
            if not count:
                return at
            end = None
            if count < 0:
                size, at = check_number(raw, at, LONG_BYTES, LONG_BITS)
                count, end = -count, at + size
            if count > len(raw) - at:
                raise EOFError
            for _ in range(count):
                at = check(raw, at)
            if end is not None and at != end:
                raise ValueError(f"a block of items ends at byte {at}, and says {end}")

    return blocks


def _null(raw: bytes, at: int) -> int:
    return at


_PRIMITIVES: dict[str, Check] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "bytes": _bytes,
    "string": _bytes,
}
