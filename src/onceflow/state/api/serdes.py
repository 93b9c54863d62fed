"""Serdes: serializers and deserializers of keys, values and state.

Any object with ``encode`` and ``decode`` can be a serde, for example a wrapper of an Avro or Protobuf library. A serde
never gets null keys and values: these are always None.
"""

from __future__ import annotations

import struct as _struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from onceflow.state.api.structs import Struct, struct
from onceflow.state.api.whole_numbers import is_another
from onceflow.state.format import exact_json

__all__ = ["BYTES", "DOUBLE", "JSON", "LONG", "STRING", "Serde", "Struct", "struct"]


@dataclass(frozen=True)
class Serde:
    """A serde made of two functions.

    ::

        UPPER = Serde(encode=lambda text: text.upper().encode(), decode=bytes.decode, name="upper")

    Args:
        encode: turns a value into bytes.
        decode: turns bytes into a value.
        name: its name in error messages.
    """

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    name: str = "custom"

    def __repr__(self) -> str:
        return f"<serde {self.name}>"


def is_serde(serde: Any) -> bool:
    """Whether an object can be used as a serde: it has ``encode`` and ``decode``, and is no class."""
    return not isinstance(serde, type) and all(callable(getattr(serde, name, None)) for name in ("encode", "decode"))


def prepare(serde: Any) -> None:
    """Have a serde find what it needs, if it has such a method: schemas in a registry. Called before the first record.

    Raises:
        EnvironmentUnusableError: it cannot be used.
    """
    found = getattr(serde, "prepare", None)
    if found is not None:
        found()


def schema_id(serde: Any) -> int | None:
    """The id of the schema in front of all values that a serde writes; None: it writes no such ids.

    Raises:
        EnvironmentUnusableError: it cannot be used.
    """
    found = getattr(serde, "writes_with", None)
    return None if found is None else int(found())


def schema_ids(serde: Any) -> tuple[int, ...]:
    """The ids of all schemas with which values may have been written for a serde, as far as its registry knows them.

    Raises:
        EnvironmentUnusableError: its registry does not answer.
    """
    found = getattr(serde, "subject_ids", None)
    return () if found is None else tuple(found())


def unreadable(serde: Any, ids: Iterable[int]) -> dict[bytes, str]:
    """Which values of other schemas may be unreadable for a serde: how they begin, and what has changed.

    Raises:
        EnvironmentUnusableError: its registry does not answer.
    """
    found = getattr(serde, "unreadable", None)
    return {} if found is None else dict(found(ids))


def in_own_schema(serde: Any, raw: bytes) -> bytes:
    """The bytes of a value as a serde would write it now: another version of its schema may have written it. What the
    serde cannot read stays as it is.

    Raises:
        EnvironmentUnusableError: its registry does not answer.
    """
    found = getattr(serde, "in_own_schema", None)
    return raw if found is None else bytes(found(raw))


def _to_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"expected bytes, got {type(value).__name__}: declare a serde, for example STRING or JSON")


def _same(value: bytes) -> bytes:
    return value


def _to_text_bytes(value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected str, got {type(value).__name__}")
    return value.encode()


_LONG = _struct.Struct(">q")
_DOUBLE = _struct.Struct(">d")


def _to_long(value: int) -> bytes:
    try:
        return _LONG.pack(value)
    except _struct.error as error:
        raise ValueError(f"{value!r} is not a 64-bit integer: {error}") from None


def _of_long(raw: bytes) -> int:
    if len(raw) != 8:
        raise ValueError(f"a 64-bit integer has 8 bytes, got {len(raw)}")
    return int(_LONG.unpack(raw)[0])


def _to_double(value: Any) -> bytes:
    try:
        raw = _DOUBLE.pack(value)
    except _struct.error as error:
        raise ValueError(f"{value!r} is not a number: {error}") from None
    except OverflowError:
        raise ValueError(f"{value!r:.100} is not a double: it is too large") from None
    if type(value) is not float and is_another(value, _DOUBLE.unpack(raw)[0]):
        raise ValueError(f"{value!r:.100} is not a double: it would become {_DOUBLE.unpack(raw)[0]!r}")
    return raw


def _of_double(raw: bytes) -> float:
    if len(raw) != 8:
        raise ValueError(f"a double has 8 bytes, got {len(raw)}")
    return float(_DOUBLE.unpack(raw)[0])


BYTES = Serde(_to_bytes, _same, "bytes")
"""Bytes, unchanged."""
STRING = Serde(_to_text_bytes, bytes.decode, "string")
"""Text in UTF-8."""
JSON = Serde(exact_json.dumps, exact_json.loads, "json")
"""JSON documents: dicts, lists, text, numbers, booleans. Integers up to 1e308 are exact. A decimal with more digits
than a float holds is a ``decimal.Decimal``, in both directions. NaN and infinity, which JSON lacks, are refused."""
LONG = Serde(_to_long, _of_long, "long")
"""A signed integer in eight big-endian bytes, as Kafka's LongSerializer writes it. Range scans use the order of the
bytes, in which negative numbers come after positive ones."""
DOUBLE = Serde(_to_double, _of_double, "double")
"""A float in eight big-endian bytes, as Kafka's DoubleSerializer writes it."""
