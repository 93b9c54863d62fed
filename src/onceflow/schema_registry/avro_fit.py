"""What Avro writes of a value of Python: the same value, or an error.

fastavro would write an int beyond 32 bits, cut microseconds, take a text for a boolean, and choose a type of a union by
rules of its own. So a value is brought into the plain form of its schema here: numbers in place of times and decimals,
and each value of a union with the name of its type.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from numbers import Integral, Real
from typing import Any
from uuid import UUID

from onceflow.schema_registry.avro_defaults import DAY_0, EPOCH, default_of
from onceflow.schema_registry.avro_names import NAMED, branch_name, logical_of

Fit = Callable[[Any], Any]

_LOCAL_EPOCH = datetime(1970, 1, 1)
_US = timedelta(microseconds=1)
_FLOAT = struct.Struct(">f")


def fit_of(schema: Any, named: Mapping[str, Any]) -> Fit:
    """A function that brings values into the plain form of a schema.

    It raises ValueError for a value that would not come back as it is.

    Args:
        schema: see `avro_schema.py`. named: its types by their full names.
    """
    return _Fits(named).of(schema)


class _Fits:
    """Makes the functions of a schema. A type with a name has one, also if it refers to itself."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._made: dict[str, list[Fit]] = {}

    def of(self, schema: Any) -> Fit:
        if isinstance(schema, list):
            return self._union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind in self._named:
            return self._of_name(kind)
        if kind == "array":
            return _array(self.of(schema["items"]))
        if kind == "map":
            return _map(self.of(schema["values"]))
        if kind in NAMED:
            return self._of_name(schema["name"])
        logical = logical_of(schema)
        if logical == "decimal":
            return _decimal(schema, None)
        return _LEAVES.get((kind, logical), _PRIMITIVES[kind])

    def _of_name(self, name: str) -> Fit:
        if name in self._made:
            holder = self._made[name]
            return lambda value: holder[0](value)
        holder = self._made[name] = []
        schema = self._named[name]
        if schema["type"] == "enum":
            holder.append(_enum(frozenset(schema["symbols"])))
        elif schema["type"] == "fixed" and logical_of(schema) == "decimal":
            holder.append(_decimal(schema, schema["size"]))
        elif schema["type"] == "fixed":
            holder.append(_fixed(schema["size"]))
        else:
            holder.append(self._record(schema))
        return holder[0]

    def _record(self, schema: Any) -> Fit:
        fits = {field["name"]: self.of(field["type"]) for field in schema["fields"]}
        defaults = {field["name"]: field for field in schema["fields"] if "default" in field}

        def record(value: Any) -> dict[str, Any]:
            if not isinstance(value, Mapping):
                raise _wrong(value, "a dict")
            found = {}
            for name, fit in fits.items():
                try:
                    if name in value:
                        found[name] = fit(value[name])
                    elif name in defaults:
                        field = defaults[name]
                        found[name] = fit(default_of(field["type"], field["default"], self._named))
                    else:
                        raise ValueError("it is missing, and has no default")
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            if len(value) > len(found) or not fits.keys() >= value.keys():
                unknown = next(name for name in value if name not in fits)
                raise ValueError(f"the schema has no field {unknown!r:.100}")
            return found

        return record

    def _union(self, branches: list[Any]) -> Fit:
        # A double in place of a float, if there are both.
        order = sorted(branches, key=lambda branch: branch == "float" and "double" in branches)
        fits = [(branch_name(branch), self.of(branch)) for branch in order]
        by_name = dict(fits)

        def union(value: Any) -> tuple[str, Any]:
            if type(value) is tuple and len(value) == 2 and isinstance(value[0], str):
                if value[0] not in by_name:
                    raise ValueError(f"the union has no type {value[0]!r:.100}")
                return value[0], by_name[value[0]](value[1])
            problems = []
            for name, fit in fits:
                try:
                    return name, fit(value)
                except ValueError as error:
                    problems.append(f"{name}: {error}" if name != "null" else "")
            raise ValueError("; ".join(filter(None, problems)))

        return union


def _wrong(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{value!r:.80} is {type(value).__name__}, and not {wanted}")


def _array(fit: Fit) -> Fit:
    def array(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, "a list")
        return [fit(each) for each in value]

    return array


def _map(fit: Fit) -> Fit:
    def entries(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a dict")
        return {_string(key): fit(each) for key, each in value.items()}

    return entries


def _enum(symbols: frozenset[str]) -> Fit:
    def enum(value: Any) -> str:
        if not isinstance(value, str) or value not in symbols:
            raise ValueError(f"{value!r:.80} is none of {', '.join(sorted(symbols))}"[:200])
        return str(value)

    return enum


def _fixed(size: int) -> Fit:
    def fixed(value: Any) -> bytes:
        raw: bytes = _bytes(value)
        if len(raw) != size:
            raise ValueError(f"{len(raw)} bytes, and the schema has {size}")
        return raw

    return fixed


def _decimal(schema: Any, size: int | None) -> Fit:
    precision, scale = schema["precision"], schema.get("scale", 0)

    def decimal(value: Any) -> bytes:
        if not isinstance(value, (Decimal, int)) or isinstance(value, bool):
            raise _wrong(value, "a Decimal")
        number = Decimal(value)
        if not number.is_finite():
            raise ValueError(f"{value!r} is no number")
        sign, digits, exponent = number.as_tuple()
        unscaled = int("".join(map(str, digits)) or "0")
        assert isinstance(exponent, int)
        if exponent + scale >= 0:
            unscaled *= 10 ** min(exponent + scale, precision + 1)
        else:
            unscaled, rest = divmod(unscaled, 10 ** -(exponent + scale))
            if rest:
                raise ValueError(f"{value!r} has more digits after the point than the schema, which has {scale}")
        if unscaled >= 10**precision:
            raise ValueError(f"{value!r} has more digits than the schema, which has {precision}")
        unscaled = -unscaled if sign else unscaled
        length = (unscaled.bit_length() + 8) // 8 if size is None else size
        try:
            return int(unscaled).to_bytes(length, "big", signed=True)
        except OverflowError:
            raise ValueError(f"{value!r} needs more than {size} bytes") from None

    return decimal


# ---- leaves ------------------------------------------------------------------------------------------


def _null(value: Any) -> None:
    if value is not None:
        raise _wrong(value, "None")


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "a bool")
    return value


def _integer(bits: int) -> Fit:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def integer(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, Integral)):
            raise _wrong(value, "an int")
        found = int(value)
        if not low <= found <= high:
            raise ValueError(f"{value!r:.80} is beyond {bits} bits")
        return found

    return integer


def _real(value: Any) -> float:
    """A float. An integer that a double does not have is refused."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, Real)) or not hasattr(value, "__float__"):
        raise _wrong(value, "a float")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"{value!r:.80} is too large for a float") from None
    if found != value:
        raise ValueError(f"{value!r:.80} has more digits than a double has")
    return found


def _float(value: Any) -> float:
    found = _real(value)
    try:
        short = _FLOAT.unpack(_FLOAT.pack(found))[0]
    except OverflowError:
        raise ValueError(f"{value!r} is too large for a float") from None
    if found and not short:
        raise ValueError(f"{value!r} is too small for a float")
    if not isinstance(value, float) and short != found and math.isfinite(found):
        raise ValueError(f"{value!r} has more digits than a float has")
    return found


def _bytes(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise _wrong(value, "bytes")
    return bytes(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r:.80} has half of a surrogate pair") from None
    return str(value)


def _date(value: Any) -> int:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise _wrong(value, "a date")
    return value.toordinal() - DAY_0


def _timestamp(local: bool, unit_us: int) -> Fit:
    def timestamp(value: Any) -> int:
        if not isinstance(value, datetime):
            raise _wrong(value, "a datetime")
        if (value.tzinfo is None) is not local:
            raise ValueError(f"{value!r} has {'a' if local else 'no'} time zone")
        if getattr(value, "nanosecond", 0):
            raise ValueError(f"{value!r} has nanoseconds")
        try:
            moment = value if local else value.astimezone(timezone.utc)
        except OverflowError:
            raise ValueError(f"{value!r} is beyond the years of Python in UTC") from None
        found, rest = divmod((moment - (_LOCAL_EPOCH if local else EPOCH)) // _US, unit_us)
        if rest:
            raise ValueError(f"{value!r} has microseconds, and the schema has milliseconds")
        return int(found)

    return timestamp


def _time(unit_us: int) -> Fit:
    def of_day(value: Any) -> int:
        if not isinstance(value, time):
            raise _wrong(value, "a time")
        if value.tzinfo is not None:
            raise ValueError(f"{value!r} has a time zone")
        us = ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
        found, rest = divmod(us, unit_us)
        if rest:
            raise ValueError(f"{value!r} has microseconds, and the schema has milliseconds")
        return found

    return of_day


def _uuid(value: Any) -> str:
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(_string(value)))
    except ValueError:
        raise ValueError(f"{value!r:.80} is no UUID") from None


_PRIMITIVES: dict[str, Fit] = {
    "null": _null,
    "boolean": _boolean,
    "int": _integer(32),
    "long": _integer(64),
    "float": _float,
    "double": _real,
    "bytes": _bytes,
    "string": _string,
}
_LEAVES: dict[tuple[str, str], Fit] = {
    ("int", "date"): _date,
    ("int", "time-millis"): _time(1000),
    ("long", "time-micros"): _time(1),
    ("long", "timestamp-millis"): _timestamp(False, 1000),
    ("long", "timestamp-micros"): _timestamp(False, 1),
    ("long", "local-timestamp-millis"): _timestamp(True, 1000),
    ("long", "local-timestamp-micros"): _timestamp(True, 1),
    ("string", "uuid"): _uuid,
}
