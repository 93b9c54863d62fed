"""What fastavro would write as another value, without an error: found before it is written."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import Any

Check = Callable[[Any], None]

_LARGEST_FLOAT = 3.4028235677973366e38
"""The smallest double that is rounded to infinity as a float of 32 bits."""
_EXACT_DOUBLE = 2**53


def check_of(schema: Any) -> Check | None:
    """A function that raises ValueError for values that a schema would change. None: it changes no value of Python.

    Args:
        schema: as fastavro has parsed it.
    """
    return _Checks().of(schema)


class _Checks:
    """Makes the checks of a schema. A type that refers to itself has one check, which is found by its name."""

    def __init__(self) -> None:
        self._named: dict[str, _Record] = {}

    def of(self, schema: Any) -> Check | None:
        if isinstance(schema, list):
            return self._of_union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind in ("array", "map"):
            return _of_items(self.of(schema["items" if kind == "array" else "values"]), kind == "map")
        if kind in ("record", "error"):
            return self._of_record(schema)
        if kind in self._named:
            return self._named[kind]
        logical = schema.get("logicalType") if isinstance(schema, dict) else None
        return _LEAVES.get((kind, logical), _LEAVES.get((kind, None)))

    def _of_record(self, schema: Any) -> Check | None:
        record = self._named[schema["name"]] = _Record(frozenset(field["name"] for field in schema["fields"]))
        for field in schema["fields"]:
            if (check := self.of(field["type"])) is not None:
                record.checks[field["name"]] = check
        return record

    def _of_union(self, branches: list[Any]) -> Check | None:
        # As fastavro chooses: a double in place of a float if there are both, else the first one of that type.
        chosen = [branch for branch in branches if branch != "float" or "double" not in branches]
        checks = [(_name_of(branch), check) for branch in chosen if (check := self.of(branch)) is not None]

        def check_union(value: Any) -> None:
            named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
            for name, check in checks:
                if named:
                    if name == value[0]:
                        check(value[1])
                elif check in _TYPES:
                    if isinstance(value, _TYPES[check]):
                        check(value)
                        return
                elif not isinstance(check, _Record) or check.takes(value):
                    check(value)

        return check_union if checks else None


class _Record:
    """The check of a record.

    Args:
        fields: the names of all.

    Attributes:
        checks: of the fields that have one.
    """

    def __init__(self, fields: frozenset[str]) -> None:
        self.checks: dict[str, Check] = {}
        self._fields = fields

    def takes(self, value: Any) -> bool:
        """Whether a value may be such a record, among those of a union."""
        return isinstance(value, Mapping) and self._fields.issuperset(value)

    def __call__(self, value: Any) -> None:
        if not isinstance(value, Mapping):
            return
        for name, check in self.checks.items():
            if name in value:
                try:
                    check(value[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None


def _name_of(branch: Any) -> str:
    return branch if isinstance(branch, str) else str(branch.get("name", branch["type"]))


def _of_items(check: Check | None, values: bool) -> Check | None:
    if check is None:
        return None

    def check_items(items: Any) -> None:
        found = items.values() if values and isinstance(items, Mapping) else items
        if isinstance(items, Mapping if values else (list, tuple)):
            for item in found:
                check(item)

    return check_items


def _float(value: Any) -> None:
    if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) >= _LARGEST_FLOAT:
        raise ValueError(f"{value!r} is too large for a float")
    if isinstance(value, int) and abs(value) > 1 << 24:
        raise ValueError(f"{value!r} is an integer with more digits than a float has")


def _double(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _EXACT_DOUBLE and int(float(value)) != value:
        raise ValueError(f"{value!r} is an integer with more digits than a double has")


def _date(value: Any) -> None:
    if isinstance(value, datetime):
        raise ValueError(f"{value!r} has a time, and the schema has a date")


def _uuid(value: Any) -> None:
    if isinstance(value, str):
        uuid.UUID(value)


def _aware(value: Any) -> None:
    if isinstance(value, datetime) and value.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")


def _naive(value: Any) -> None:
    if isinstance(value, datetime) and value.tzinfo is not None:
        raise ValueError(f"{value!r} has a time zone")


def _whole_ms(value: Any) -> None:
    if isinstance(value, (datetime, time)) and value.microsecond % 1000:
        raise ValueError(f"{value!r} has microseconds, and the schema has milliseconds")


def _timestamp_millis(value: Any) -> None:
    _aware(value)
    _whole_ms(value)


def _local_millis(value: Any) -> None:
    _naive(value)
    _whole_ms(value)


_LEAVES: dict[tuple[str, str | None], Check] = {
    ("float", None): _float,
    ("double", None): _double,
    ("long", "timestamp-millis"): _timestamp_millis,
    ("long", "timestamp-micros"): _aware,
    ("long", "local-timestamp-millis"): _local_millis,
    ("long", "local-timestamp-micros"): _naive,
    ("int", "time-millis"): _whole_ms,
    ("int", "date"): _date,
    ("string", "uuid"): _uuid,
}
#: The types of Python that a check is about: among the types of a union, the first one of these takes a value.
_TYPES: dict[Check, tuple[type, ...]] = {
    _float: (int, float),
    _double: (int, float),
    _timestamp_millis: (datetime,),
    _aware: (datetime,),
    _local_millis: (datetime,),
    _naive: (datetime,),
    _whole_ms: (time,),
    _date: (date,),
    _uuid: (str, uuid.UUID),
}
