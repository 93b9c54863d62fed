"""``Record``: what a processor reads and yields."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceflow.protocol.headers import Header  # needs Arrow


class Record:
    """A record that was read from a topic, or that is to be written.

    ::

        yield Record(key, {"balance": 12})                       # to the output topic
        yield Record(key, b"raw", topic="alerts", headers=[("reason", b"limit")])

    Args:
        key: the key, encoded and decoded by the processor's ``key`` serde. None: no key. You may also write bytes.
        value: the value, decoded by the ``value`` serde when it is read, encoded by the ``output`` serde when it is
            written. None: a tombstone. You may also write bytes.
        topic: where it was read, or where to write it. None: the default output topic.
        headers: pairs of a name and bytes (or None). They are a tuple in a record that was read.
        timestamp_ms: epoch milliseconds. None in a record that was read: it has no time. None, or a time before 1970,
            in a record to write: the time of writing.
        partition: where it was read. Ignored when it is written: the key decides the partition.
        offset: where it was read. Ignored when it is written.

    If you yield a record that was read, it goes to the default output topic, not to the topic where it was read. Set
    ``topic`` to send it elsewhere.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """A call may copy its record for each attempt, and the general way takes three times as long."""
        found = copy.copy(self)
        memo[id(self)] = found
        found.key, found.value = copy.deepcopy(self.key, memo), copy.deepcopy(self.value, memo)
        if type(self.headers) is not tuple:
            found.headers = copy.deepcopy(self.headers, memo)
        return found

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
