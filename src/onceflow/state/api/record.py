"""``Record``: what a processor reads and what it yields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Header = tuple[str, bytes | None]


class Record:
    """One record: as it was read from a topic, or as it shall be written.

    ::

        yield Record(key, {"balance": 12})                       # to the output topic
        yield Record(key, b"raw", topic="alerts", headers=[("reason", b"limit")])

    Args:
        key: of a record that was read, as the processor's ``key`` serde decodes it. One that is written may also
            be bytes already; None for no key.
        value: likewise, by the ``value`` serde when read and the ``output`` serde when written. None is a
            tombstone.
        topic: it was read from, or is to be written to; None for the default output topic.
        headers: pairs of name and bytes (or None); a tuple when read.
        timestamp_ms: epoch milliseconds; None when written: the time of writing.
        partition: it was read from; ignored when written, the key decides.
        offset: it was read at; ignored when written. A record that was read and is yielded goes to the default output
            topic, not back to where it came from, unless its ``topic`` was set to another.
    """

    __slots__ = ("_read_from", "headers", "key", "offset", "partition", "timestamp_ms", "topic", "value")
    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __init__(
        self,
        key: Any = None,
        value: Any = None,
        topic: str | None = None,
        headers: Iterable[Header] = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
        offset: int | None = None,
        _read_from: str | None = None,
    ) -> None:
        self.key = key
        self.value = value
        self.topic = topic
        self.headers = headers
        self.timestamp_ms = timestamp_ms
        self.partition = partition
        self.offset = offset
        self._read_from = _read_from

    def _fields(self) -> tuple[Any, ...]:
        return (
            self.key,
            self.value,
            self.topic,
            tuple(self.headers),
            self.timestamp_ms,
            self.partition,
            self.offset,
        )

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Record) else NotImplemented

    def __repr__(self) -> str:
        rest = [
            f", {name}={value!r}"
            for name, value in (
                ("topic", self.topic),
                ("headers", self.headers or None),
                ("timestamp_ms", self.timestamp_ms),
                ("partition", self.partition),
                ("offset", self.offset),
            )
            if value is not None
        ]
        return f"Record(key={self.key!r}, value={self.value!r}{''.join(rest)})"
