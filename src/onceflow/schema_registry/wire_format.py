"""What stands before a value: which schema has written it.

The format is that of Confluent's serializers: a zero byte and the schema's id in four bytes, or a byte with the value 1
and its GUID in 16 bytes. For Protobuf, the path to the message in its file follows, see `message_path`.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from onceflow.protocol import varints
from onceflow.protocol.record_fields import varint

_ID, _GUID = 0, 1
_ID_LENGTH, _GUID_LENGTH = 5, 17
_MOST_NESTED = 100


class SchemaId(NamedTuple):
    """How a record names its schema.

    Args:
        key: the id, a number; or the GUID, a text with 36 characters.
    """

    key: int | str

    def __str__(self) -> str:
        return f"id {self.key}" if isinstance(self.key, int) else f"GUID {self.key}"


#: The headers in which serializers write what otherwise stands before the key and the value.
KEY_HEADER, VALUE_HEADER = "__key_schema_id", "__value_schema_id"


def split(raw: bytes) -> tuple[SchemaId, int]:
    """The schema's id, and where the data begins.

    Raises:
        ValueError: nothing of this kind is there.
    """
    kind = raw[0] if raw else None
    if kind == _ID and len(raw) >= _ID_LENGTH:
        return SchemaId(int.from_bytes(raw[1:_ID_LENGTH], "big")), _ID_LENGTH
    if kind == _GUID and len(raw) >= _GUID_LENGTH:
        return SchemaId(str(uuid.UUID(bytes=bytes(raw[1:_GUID_LENGTH])))), _GUID_LENGTH
    if kind in (_ID, _GUID):
        raise ValueError(f"it ends within the id of its schema: {len(raw)} bytes")
    found = "it is empty" if kind is None else f"its first byte is {kind}, not {_ID}"
    raise ValueError(f"it does not begin with the id of a schema: {found}")


def prefix(schema_id: int) -> bytes:
    """What stands before the data."""
    return bytes([_ID]) + schema_id.to_bytes(4, "big")


def message_path(raw: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """The place of a Protobuf message in its file, and where its data begins.

    It is a count and so many numbers: which message of the file, which of those that are nested in it, and so on. All
    are zigzag varints. The count 0 means the first message.

    Raises:
        ValueError: it is no such path.
    """
    count, at = _varint(raw, at)
    if not 0 <= count <= _MOST_NESTED:
        raise ValueError(f"the path to its message has {count} parts")
    path = []
    for _ in range(count):
        part, at = _varint(raw, at)
        if part < 0:
            raise ValueError(f"the path to its message has the part {part}")
        path.append(part)
    return tuple(path) or (0,), at


def path_bytes(path: tuple[int, ...]) -> bytes:
    """The bytes of such a path."""
    return b"\0" if path == (0,) else b"".join(varints.encode(part) for part in (len(path), *path))


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    try:
        return varint(raw, at)
    except (IndexError, ValueError):
        raise ValueError("the path to its message is not complete") from None
