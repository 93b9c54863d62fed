"""Dead letters, late records and duplicates: unchanged records, with additional headers that contain the cause.

A timer that fails has no record. Its letter names the key and the timer.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from onceflow import user_code
from onceflow.errors import BadRecordError
from onceflow.protocol.headers import Header
from onceflow.protocol.output_limits import OutputLimits
from onceflow.protocol.timestamps import ORIGINAL_TIMESTAMP, known_ms
from onceflow.state.api.record import Record
from onceflow.state.api.user_errors import MAX_MESSAGE, full_text_of, line_of, shown, stack_of, text_of
from onceflow.state.format import exact_json
from onceflow.user_code import cut

if TYPE_CHECKING:
    from onceflow.state.api.timers import Timer

PREFIX = "onceflow."
ERROR_CLASS = "onceflow.error.class"
ERROR_MESSAGE = "onceflow.error.message"
ERROR_STACK = "onceflow.error.stack"
ERROR_TOPIC = "onceflow.error.topic"
ERROR_PARTITION = "onceflow.error.partition"
ERROR_OFFSET = "onceflow.error.offset"
ERROR_FLOW = "onceflow.error.flow"
"""The flow in which the record has failed. Several flows may have one topic of dead letters."""
ORIGIN_TOPIC = "onceflow.origin.topic"
ORIGIN_PARTITION = "onceflow.origin.partition"
ORIGIN_OFFSET = "onceflow.origin.offset"
ATTEMPT = "onceflow.attempt"
"""How often the record has become a dead letter, including this time."""
TIMER_NAME = "onceflow.timer.name"
"""Only a letter of a timer has it: no record has failed, but ``on_timer``, or a window that was closed by a timer."""
TIMER_CLOCK = "onceflow.timer.clock"
TIMER_AT = "onceflow.timer.at_ms"
TIMER_TABLE = "onceflow.timer.table"
"""The table of the timer's key, with the partition: ``balances-3``."""

RECORD_KEY = "onceflow.key"
"""Header with the record's own key, because the key of a parked record is its origin. Without this header, the record
had no key."""
NULL_VALUE = "onceflow.value.null"
"""Header of a parked record whose value was null. In a compacted topic, a null value would delete the record."""
PARKED_WHY = "onceflow.parked.why"
"""Header of a parked record: why it is not retried any more. ``attempts``: it has failed too often; ``permanent``: its
cause is one that no retry can mend; ``not a record``: it is the letter of a timer, or was shortened; ``too large``: it
cannot wait in the table; ``refused``: its retry topic does not take it."""
RETRY_TOPIC = "onceflow.retry.topic"
"""Header of a retried record, and of a parked one: the topic to which its retries go, see `has_come_back`."""

DUPLICATE_ID = "onceflow.duplicate.id"
"""The id of a duplicate."""
DUPLICATE_SEEN = "onceflow.duplicate.seen"
"""The event time of the record with the same id that was passed on, in epoch milliseconds."""

#: What a letter says of its cause and its place; other headers, whatever their names, are those of the record.
ABOUT = frozenset(
    {
        *(ERROR_CLASS, ERROR_MESSAGE, ERROR_STACK, ERROR_TOPIC, ERROR_PARTITION, ERROR_OFFSET, ERROR_FLOW),
        *(ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, ATTEMPT),
        *(TIMER_NAME, TIMER_CLOCK, TIMER_AT, TIMER_TABLE, DUPLICATE_ID, DUPLICATE_SEEN),
        # Those of a letter that is parked.
        *(RECORD_KEY, NULL_VALUE, RETRY_TOPIC, PARKED_WHY),
    }
)

LATE, DUPLICATE = "LateRecord", "DuplicateRecord"
"""Classes of the cause of a late record, and of a duplicate."""

SHORTENED = "onceflow.shortened"
"""Header of a letter that was too large for its topic: a JSON document with the sizes, in bytes, of the parts that were
cut (``value``, ``key``, ``headers``). Such a letter is not the record any more."""
LETTER_BYTES_MIN = 8_000
"""A topic that takes less cannot have letters: not even the cause would fit."""

# The text of an error may contain the whole record. Headers count towards the topic's maximum record size.
_STACK_CHARACTERS = 2000
_CAUSE_CHARACTERS = 300
_CAUSE_BYTES = (2000, 1000, 500, 200, 50)
_NO_STACK = b"(left out, because the letter was too large)"
# More than a record batch with one record has besides its key, value and headers, and than the header SHORTENED; and
# than the headers that a letter gets in addition when it waits or is parked.
_OVERHEAD_BYTES = 1300
# More than the two lengths of a header.
_HEADER_BYTES = 10
_COUNT = re.compile(rb"[0-9]{1,9}")

IDENTITY = re.compile(r"[a-zA-Z0-9._-]{1,249}/[0-9]{1,10}/[0-9]{1,19}")
"""A place in Kafka: ``topic/partition/offset``."""


def _with_cause(record: Record, topic: str, kind: str, message: str, further: tuple[Header, ...] = ()) -> Record:
    """The record for the topic of dead letters or late records.

    Args:
        record: as it was read, with key and value in bytes.
        topic: the topic that it is written to.
        kind: class name of the cause.
        message: text of the cause.
        further: more headers about the cause.

    Returns:
        A record with the same key, value, headers and timestamp, and the cause in additional headers. If the record was
        a dead letter or late before, the headers from that time are replaced, except those with its origin.
    """
    came_back = has_come_back(record)
    before = dict(record.headers) if came_back and origin_of(record.headers) else {}
    cause: list[Header] = [
        (ERROR_CLASS, kind.encode(errors="replace")),
        (ERROR_MESSAGE, message[:MAX_MESSAGE].encode(errors="replace")),
        *further,
    ]
    places = (
        (ERROR_TOPIC, ORIGIN_TOPIC, record.topic),
        (ERROR_PARTITION, ORIGIN_PARTITION, record.partition),
        (ERROR_OFFSET, ORIGIN_OFFSET, record.offset),
    )
    cause += [(name, str(where).encode()) for name, _, where in places if where is not None]
    if ORIGIN_TOPIC in before:
        cause += [(name, before[name]) for _, name, _ in places]
    else:
        cause += [(name, str(where).encode()) for _, name, where in places if where is not None]
    # A letter is read where it was written, so it does not say where a retry of its record was read. Whoever wrote the
    # record does not say where it was read.
    replaced = {name for name, _ in cause} | {ERROR_STACK, ERROR_FLOW, RETRY_TOPIC, *(name for name, _, _ in places)}
    if not before:
        replaced |= {ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET}
    if not came_back:
        replaced.add(ATTEMPT)
    kept = [header for header in record.headers if header[0] not in replaced]
    return Record(record.key, record.value, topic, (*kept, *cause), known_ms(record.timestamp_ms))


def late_record(record: Record, topic: str, event_ms: int, watermark_ms: int) -> Record:
    """A record that is older than the watermark, for the late topic."""
    message = f"event time {event_ms} is before the watermark {watermark_ms} (milliseconds)"
    return _with_cause(record, topic, LATE, message)


def duplicate(record: Record, topic: str, id_: bytes, seen_ms: int | None) -> Record:
    """A record whose id was seen before, for the topic of duplicates.

    Args:
        seen_ms: the event time of the record with this id that was passed on; None: it is not known.
    """
    when = "" if seen_ms is None else f" in a record of the time {seen_ms} (milliseconds)"
    seen: tuple[Header, ...] = () if seen_ms is None else ((DUPLICATE_SEEN, str(seen_ms).encode()),)
    message = f"the id {shown(id_)} was seen before{when}"
    return _with_cause(record, topic, DUPLICATE, message, ((DUPLICATE_ID, id_), *seen))


def dead_letter(record: Record, topic: str, error: BaseException, flow: str = "") -> Record:
    """A record that could not be processed, for the dead-letter topic.

    Args:
        flow: in which it has failed; empty: not known.
    """
    further: tuple[Header, ...] = ((ERROR_FLOW, flow.encode()),) if flow else ()
    further += ((ERROR_STACK, _stack(error).encode(errors="replace")), _next_attempt(record))
    return _with_cause(record, topic, type(error).__name__, text_of(error), further)


def timer_letter(
    key: bytes, timer: Timer, topic: str, table: str, error: BaseException, about: Mapping[str, Any] | None = None
) -> Record:
    """The dead letter of a timer. It names key and timer, because there is no record that it could contain.

    Args:
        key: the key of the timer, in bytes.
        topic: the topic that the letter is written to.
        table: the partition of the table, as ``balances-3``.
        about: more of what was lost, such as the window. What JSON has no form for, such as NaN, becomes text.

    Returns:
        A record with the key, a JSON document that names the timer as value, and the cause in headers.
    """
    named = {"timer": timer.name, "clock": timer.clock, "at_ms": timer.at_ms, **(about or {})}
    headers = (
        (ERROR_CLASS, type(error).__name__.encode(errors="replace")),
        (ERROR_MESSAGE, text_of(error)[:MAX_MESSAGE].encode(errors="replace")),
        (ERROR_STACK, _stack(error).encode(errors="replace")),
        (TIMER_NAME, timer.name.encode(errors="replace")),
        (TIMER_CLOCK, timer.clock.encode()),
        (TIMER_AT, str(timer.at_ms).encode()),
        (TIMER_TABLE, table.encode()),
        (ATTEMPT, b"1"),
    )
    return Record(key, exact_json.written(_in_json(named)).encode(), topic, headers)


def _in_json(value: Any, levels: int = 20) -> Any:
    """The value with text in place of whatever JSON cannot express: a letter can always be written."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) in (int, float, Decimal) and exact_json.is_written(value):
        return value
    if levels and isinstance(value, Mapping):
        named = {_name_in_json(name): _in_json(each, levels - 1) for name, each in value.items()}
        return named if len(named) == len(value) else _as_text(value)
    if levels and isinstance(value, (list, tuple)):
        return [_in_json(each, levels - 1) for each in value]
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(value).decode()}
    return _as_text(value)


def _name_in_json(name: Any) -> str:
    return name if type(name) is str else _as_text(name)


def _as_text(value: Any) -> str:
    try:
        return cut(repr(value), MAX_MESSAGE)
    except Exception:  # a __repr__ of the user's, or an integer of too many digits
        return f"<{type(value).__name__}>"


def fitted(letter: Record, limits: OutputLimits | None) -> Record:
    """The letter in a form that its topic takes.

    First the stack is left out. If that is not enough, the letter is shortened: the record's own headers keep up to a
    quarter of the room, in their order, the key up to a quarter, and the value the rest. Headers about the cause keep
    up to 2,000 bytes each, and half of the room together. The header `SHORTENED` says what was cut.

    Args:
        letter: with key and value in bytes.
        limits: what the topic takes; None: it is not known.
    """
    headers = list(letter.headers)
    key, value = letter.key, letter.value
    # A topic that refuses the timestamp gets it in a header.
    later: list[Header] = [] if letter.timestamp_ms is None else [(ORIGINAL_TIMESTAMP, bytes(20))]
    if limits is None or not _is_too_large(limits, key, value, [*headers, *later]):
        return letter
    headers = [(name, _NO_STACK if name == ERROR_STACK else each) for name, each in headers]
    if _is_too_large(limits, key, value, [*headers, *later]):
        whole, most = (key, value, headers), limits.max_message_bytes
        key, value, headers = _shortened(*whole, most)
        # What cannot be compressed may become larger where brokers compress it.
        while _is_too_large(limits, key, value, [*headers, *later]) and most > LETTER_BYTES_MIN // 2:
            most -= most // 16
            key, value, headers = _shortened(*whole, most)
    return Record(key, value, letter.topic, tuple(headers), letter.timestamp_ms)


def _is_too_large(limits: OutputLimits, key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> bool:
    return bool(limits.refusal(b"" if key is None else key, value, headers))  # a shorter one would have no key either


def _shortened(
    key: bytes | None, value: bytes | None, headers: Sequence[Header], most: int
) -> tuple[bytes | None, bytes | None, list[Header]]:
    cut_to: dict[str, int] = {}
    own = [header for header in headers if header[0] not in ABOUT]
    given = {header[0]: header for header in headers if header[0] in ABOUT}
    cause: list[Header] = []
    for at_most in _CAUSE_BYTES:
        cause = [(name, each if each is None else each[:at_most]) for name, each in given.values()]
        if _header_bytes(cause) <= (most - _OVERHEAD_BYTES) // 2:
            break
    room = most - _OVERHEAD_BYTES - _header_bytes(cause)
    kept: list[Header] = []
    left = room // 4
    for header in own:
        if (size := _header_bytes([header])) <= left:
            kept.append(header)
            left -= size
    if len(kept) < len(own):
        cut_to["headers"] = _header_bytes(own)
    room -= _header_bytes(kept)
    if key is not None and len(key) > most // 4:
        cut_to["key"] = len(key)
        key = key[: most // 4]
    room = max(0, room - len(key or b""))
    if value is not None and len(value) > room:
        cut_to["value"] = len(value)
        value = value[:room]
    if not cut_to:  # the headers about the cause were too large alone
        cut_to["headers"] = _header_bytes(headers)
    return key, value, [*kept, *cause, (SHORTENED, json.dumps(cut_to).encode())]


def _header_bytes(headers: Iterable[Header]) -> int:
    return sum(len(name.encode(errors="replace")) + len(each or b"") + _HEADER_BYTES for name, each in headers)


def depends_on_topics(headers: Iterable[Header]) -> bool:
    """Whether a letter is what it is because of what a topic takes: it was shortened, or an output or a row of its
    record could not be written."""
    found = dict(headers)
    return SHORTENED in found or found.get(ERROR_CLASS) == BadRecordError.__name__.encode()


def why_not_retried(headers: Iterable[Header]) -> str:
    """Why a letter cannot be sent again as a record, in words; empty: it can."""
    names = {name for name, _ in headers}
    if TIMER_NAME in names:
        return "it is the letter of a timer, and the flow would take its value for a record of a source"
    return "parts of it were cut, because it was too large" if SHORTENED in names else ""


def refused_record(record: Record, topic: str, kind: str, message: str) -> Record:
    """A record whose row another system does not take, for the dead-letter topic.

    Args:
        kind: class of the error. message: its text.
    """
    return _with_cause(record, topic, kind, message, (_next_attempt(record),))


def described(record: Record, error: BaseException) -> str:
    """The place of a record and what is wrong with it, as text for log and error messages."""
    topic = record.topic or "a record"
    place = topic if record.partition is None else f"{topic}-{record.partition}"
    offset = "" if record.offset is None else f", offset {record.offset}"
    return described_as(f"{place}{offset}", error)


def described_as(what: str, error: BaseException) -> str:
    """What has failed and what is wrong with it, as text for log and error messages."""
    line = line_of(error)
    return f"{what}: {cut(full_text_of(error), _CAUSE_CHARACTERS)}{f' ({line})' if line else ''}"


def origin_of(headers: Iterable[Header]) -> str:
    """The origin in headers, ``topic/partition/offset``; empty: there is none that is complete and valid."""
    return _place_in(headers, (ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET))


def read_at(headers: Iterable[Header]) -> str:
    """Where the record of a letter was read, ``topic/partition/offset``; empty: the letter does not say so."""
    return _place_in(headers, (ERROR_TOPIC, ERROR_PARTITION, ERROR_OFFSET))


def _place_in(headers: Iterable[Header], names: tuple[str, str, str]) -> str:
    found = dict(headers)
    place = b"/".join(found.get(name) or b"" for name in names).decode(errors="surrogateescape")
    return place if IDENTITY.fullmatch(place) else ""


def header_text(headers: Iterable[Header], name: str) -> str:
    """The last header with this name, as text; empty: there is none."""
    return (dict(headers).get(name) or b"").decode(errors="replace")


def has_come_back(record: Record) -> bool:
    """Whether the headers with origin and attempts, if a record has them, are about this record.

    A flow may pass the headers of a retried record on to its outputs, which are other records: one input may have
    several. ``Retry`` says in a header to which topic it sends a record, so a record that was read elsewhere has not
    come back. Records without this header come from other services, or from earlier versions.
    """
    sent_to, topic = dict(record.headers).get(RETRY_TOPIC), read_from(record)
    if sent_to is None or topic is None or None in (record.partition, record.offset):
        return True  # it is not known, or not for sure, where it was read
    return sent_to == topic.encode()


def read_from(record: Record) -> str | None:
    """The topic where a record was read, whatever topic user code has given it since. None: not known."""
    return record.topic if record._read_from is None else record._read_from


def attempts(record: Record) -> int:
    """How often a record has been a dead letter: 0 if it never was, or if its header is not a number."""
    count = dict(record.headers).get(ATTEMPT)
    return int(count) if count is not None and _COUNT.fullmatch(count) else 0


def _next_attempt(record: Record) -> Header:
    before = attempts(record) if has_come_back(record) else 0
    return ATTEMPT, str(before + 1).encode()


def idempotency_key(record: Record) -> str:
    """A name of a record that stays the same when its batch runs again, and when ``Retry`` brings the record back.

    It is ``topic/partition/offset`` of where the record was read for the first time. The flow must read headers
    (``flow.read(..., include_headers=True)``) if records come back. When a topic is deleted and created again, its
    offsets begin again, and so do these names: prefer an identifier that the record itself has. Rows that were made of
    one record, as by ``explode``, have the same name: add what tells them apart.

    Raises:
        ValueError: the rows lack the columns topic, partition or offset.
    """
    if has_come_back(record) and (origin := origin_of(record.headers)):
        return origin
    own = (read_from(record), record.partition, record.offset)
    if None in own:
        raise ValueError("the record does not say where it was read: keep the columns topic, partition and offset")
    return "/".join(map(str, own))


def _stack(error: BaseException) -> str:
    """The innermost lines of a traceback. They show the place of the error; the outermost lines are of the engine."""
    last = f"{type(error).__name__}: {user_code.said(error)}"[: _STACK_CHARACTERS // 2]
    places = stack_of(error)
    room = _STACK_CHARACTERS - len(last)
    return (places if len(places) <= room else places[-room:].split("\n", 1)[-1]) + last
