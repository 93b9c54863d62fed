"""Late and dead letters: records that are put aside with the reason in their headers."""

from __future__ import annotations

from onceflow.state.record import Header, Record

ERROR_CLASS = "onceflow.error.class"
ERROR_MESSAGE = "onceflow.error.message"
ERROR_TOPIC = "onceflow.error.topic"
ERROR_PARTITION = "onceflow.error.partition"
ERROR_OFFSET = "onceflow.error.offset"

LATE = "LateRecord"
"""Class of the cause of a late letter."""

# A message may quote the whole record, and headers are limited by the topic's record size.
_MESSAGE_CHARACTERS = 1000


def put_aside(record: Record, topic: str, kind: str, message: str) -> Record:
    """The record for the topic of late or dead letters.

    Args:
        record: as it was read, key and value in bytes.
        topic: of the letters.
        kind: the cause, a class name.
        message: what was wrong.

    Returns:
        the same key, value, headers and timestamp, and the cause in further headers.
    """
    cause: list[Header] = [
        (ERROR_CLASS, kind.encode()),
        (ERROR_MESSAGE, message[:_MESSAGE_CHARACTERS].encode(errors="replace")),
    ]
    for name, where in (
        (ERROR_TOPIC, record.topic),
        (ERROR_PARTITION, record.partition),
        (ERROR_OFFSET, record.offset),
    ):
        if where is not None:
            cause.append((name, str(where).encode()))
    return Record(record.key, record.value, topic, (*record.headers, *cause), record.timestamp_ms)


def late(record: Record, topic: str, event_ms: int, watermark_ms: int) -> Record:
    """A letter of a record that is older than the watermark."""
    message = f"event time {event_ms} is before the watermark {watermark_ms} (milliseconds)"
    return put_aside(record, topic, LATE, message)


def dead(record: Record, topic: str, error: Exception) -> Record:
    """A letter of a record that could not be processed."""
    return put_aside(record, topic, type(error).__name__, str(error))
