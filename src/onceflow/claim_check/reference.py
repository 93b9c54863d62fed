"""References: what travels through Kafka in place of a value that was stored.

The bytes are the prefix ``FF`` ``onceflow-claim-check/1`` and a space, followed by a JSON document in one line::

    {"name":"2026-11-23/9f86d081...","sha256":"9f86d081...","size":104857600}

``FF`` occurs nowhere in UTF-8, so neither text nor JSON begins like this. A value that does is stored whatever its
size, so a reader can tell the two apart without error.
"""

from __future__ import annotations

import json
import re

from onceflow.errors import ClaimCheckError

PREFIX = b"\xffonceflow-claim-check/"
"""How every reference begins, in every version of the format. The number of the version and a space follow."""

VERSION = b"1 "
"""The version that this onceflow knows."""

NEWER = rb"(?:[2-9]|[1-9]\d{1,3}) "
"""A pattern: what follows the prefix in newer versions. A reference of any version has at least 75 bytes."""

REFERS = "-refers"
"""How the name of an object ends whose content may have references itself."""

NAME = re.compile(rf"\d{{4}}-\d\d-\d\d/[0-9a-f]{{64}}(?:{REFERS})?")
"""Names of objects: the day (UTC) on which it was stored, and the hash of the content."""

MAX_BYTES = 512
"""A reference is shorter than this."""


class Reference(bytes):
    """The bytes of a reference, ready to be written to Kafka.

    Attributes:
        name: of the object, relative to the store.
        size: of the value, in bytes.
        sha256: of the value, as hexadecimal digits.
        place: the `place` of the store that has just stored it; "": it was read. It is not in the bytes.
    """

    name: str
    size: int
    sha256: str
    place: str = ""

    @classmethod
    def of(cls, name: str, size: int, sha256: str) -> Reference:
        """The reference to an object."""
        document = json.dumps({"name": name, "sha256": sha256, "size": size}, separators=(",", ":"))
        return cls.parse(PREFIX + VERSION + document.encode())

    @classmethod
    def parse(cls, raw: bytes) -> Reference:
        """The reference that these bytes are.

        Raises:
            ClaimCheckError: they are damaged, or of a newer version of the format. They are never guessed at: what is
                read is only what this format allows, so a reference cannot name a file outside of the store.
        """
        if not raw.startswith(PREFIX + VERSION):
            raise unreadable(raw, "it is of a version of the format that this onceflow does not know")
        if len(raw) >= MAX_BYTES:
            raise unreadable(raw, "it is damaged: it is too long")
        try:
            document = json.loads(raw[len(PREFIX) + len(VERSION) :])
            name, size, sha256 = document["name"], document["size"], document["sha256"]
            whole = (
                NAME.fullmatch(name)
                and name.removesuffix(REFERS).endswith(f"/{sha256}")
                and type(size) is int
                and size >= 0
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise unreadable(raw, f"it is damaged ({type(error).__name__})") from None
        if not whole:
            raise unreadable(raw, "it is damaged")
        found = cls(raw)
        found.name, found.size, found.sha256 = name, size, sha256
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return _stored_at, (bytes(self), self.place)


def _stored_at(raw: bytes, place: str) -> Reference:
    found = Reference.parse(raw)
    found.place = place
    return found


def is_reference(raw: bytes) -> bool:
    """Whether these bytes are a reference, of whatever version, and not a value."""
    return raw.startswith(PREFIX)


def unreadable(raw: bytes, why: str) -> ClaimCheckError:
    """The error for a reference, at the beginning of these bytes, that cannot be read."""
    return ClaimCheckError(
        f"A reference to a stored value cannot be read: {why}",
        detail=f"it is {bytes(raw[:MAX_BYTES])!r}",
        next_step="find out who has written it; a newer format needs a newer onceflow",
    )
