"""Rows of state: the format of their keys and contents in the local store and in the topics.

A store contains the rows of one table partition. Each row key begins with a letter:

========  ==============================================  =====================  =======================
letter    rest of the row key                             row                    in Kafka
========  ==============================================  =====================  =======================
``v``     the user's key, unchanged                       the key's value        table topic: key, value
``m``     escaped user key, escaped name, entry key       an entry of a map      internal topic, unchanged
``t``     escaped user key, timer's name                  when it is due         internal topic, unchanged
``T``     clock, time, escaped user key, timer's name     empty                  nowhere: an index of ``t``
``X``     time, row key                                   empty                  nowhere: an index of expiry
``D``     event time, row key                             empty                  nowhere: an index of due rows
``J``     escaped canonical form, the user's key          empty                  nowhere: see `json_index`
``S``     segment, user key                               a stamped row          table topic: key, stamp
``F``     segment, or nothing                             filter, or the list    nowhere: see ``segments.py``
========  ==============================================  =====================  =======================

Escaped means that each zero byte becomes ``00 01``, and that ``00 00`` marks the end. This keeps the order of the
bytes, and shows where the part ends. Index rows are computed from the other rows (`with_index`), so they are created
again wherever rows are applied.

A row consists of a byte of flags, the fields that the flags announce, and the payload. In the table topic, flags and
fields of ``v`` rows are in the record's headers, so that other readers see an ordinary table. Only the flag of stamped
rows (``stamps.py``) is not in the records: whoever reads the topic of such a table knows what it is.

Rows of joins by time (``waiting_rows.py``) are *due* at an event time, which is one of the fields: when the watermark
reaches it, they are handled and deleted.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from onceflow.state.format import exact_json

VALUE, MAP, TIMER, TIMER_INDEX, EXPIRY_INDEX, SEGMENT, FILTER = b"v", b"m", b"t", b"T", b"X", b"S", b"F"
JSON_INDEX, DUE_INDEX = b"J", b"D"

# Keys of rows may have any length: stores see to that.

EXPIRES_HEADER = "onceflow.expires"
VERSION_HEADER = "onceflow.version"

HAS_EXPIRY, HAS_VERSION, STAMPED, IS_DUE = 1, 2, 4, 8
INDEXED = HAS_EXPIRY | IS_DUE
"""Flags of rows that have an index row of their time."""
_TIMER_PAYLOAD = 1  # where it begins in a row without fields: clock and time
_TIME = struct.Struct(">Q")
_VERSION = struct.Struct(">I")
_SIGN = 1 << 63
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_VERSION_MAX = (1 << 32) - 1
#: What JSON documents begin with that may have a `json_index`.
JSON_BEGINS = (b"\t", b"\n", b"\r", b" ", b'"', b"[", b"{")

Changes = Iterable[tuple[bytes, bytes | None]]
"""Row keys and rows; None deletes the row."""


class Row(NamedTuple):
    """The parts of a row.

    Args:
        payload: the user's bytes.
        expires_ms: time in epoch milliseconds after which the row counts as deleted; None: never.
        version: version of the processor that wrote it; 0 if it declared none.
    """

    payload: bytes
    expires_ms: int | None = None
    version: int = 0


def pack(payload: bytes, expires_ms: int | None = None, version: int = 0) -> bytes:
    """A row from its parts."""
    if expires_ms is None and not version:
        return b"\0" + payload
    flags = (HAS_EXPIRY if expires_ms is not None else 0) | (HAS_VERSION if version else 0)
    expiry = time_bytes(expires_ms) if expires_ms is not None else b""
    return bytes((flags,)) + expiry + (_VERSION.pack(version) if version else b"") + payload


def unpack(row: bytes) -> Row:
    """The parts of a row."""
    flags = row[0]
    if not flags:
        return Row(row[1:])
    expires_ms, version, at = None, 0, 1
    if flags & HAS_EXPIRY:
        expires_ms, at = time_of(row[at : at + 8]), at + 8
    if flags & HAS_VERSION:
        version, at = _VERSION.unpack_from(row, at)[0], at + 4
    if flags & IS_DUE:  # it has no other fields
        at += 8
    return Row(row[at:], expires_ms, version)


def record_headers(row: Row) -> list[tuple[str, bytes]]:
    """Expiry and version of a ``v`` row as headers of its record: decimal numbers, which people can read, too."""
    found = []
    if row.expires_ms is not None:
        found.append((EXPIRES_HEADER, str(row.expires_ms).encode()))
    if row.version:
        found.append((VERSION_HEADER, str(row.version).encode()))
    return found


def from_record(value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> bytes:
    """The ``v`` row of a record of the table topic. Unknown and invalid headers are ignored."""
    expires_ms, version = None, 0
    for name, raw in headers:
        if name in (EXPIRES_HEADER, VERSION_HEADER) and (number := number_in(raw)) is not None:
            if name == EXPIRES_HEADER:
                expires_ms = number
            else:
                version = number
    # Other programs may have written the record. A restore must not fail because of it, so a version that does not fit
    # is ignored.
    return pack(value, expires_ms, version if is_version(version) else 0)


def number_in(raw: bytes | None) -> int | None:
    """The number of 64 bits in a header of a record; None: there is none."""
    number = None if raw is None or not _NUMBER.fullmatch(raw) else int(raw)
    return number if number is not None and -_SIGN <= number < _SIGN else None


def is_version(number: int) -> bool:
    """Whether a number is possible as the version of a processor."""
    return 0 <= number <= _VERSION_MAX


def expiry_of(row: bytes) -> int | None:
    """When a row expires, without unpacking the rest."""
    return time_of(row[1:9]) if row[0] & HAS_EXPIRY else None


def live_payload(row: bytes, now_ms: int) -> bytes | None:
    """The payload of a row, or None if the row has expired."""
    if not row[0]:  # neither expiry nor version: most rows
        return row[1:]
    payload, expires_ms, _ = unpack(row)
    return payload if expires_ms is None or expires_ms > now_ms else None


def time_bytes(ms: int) -> bytes:
    """A signed time in eight bytes. The order of the bytes is the order of the times."""
    return _TIME.pack((ms + _SIGN) & 0xFFFF_FFFF_FFFF_FFFF)


def time_of(raw: bytes) -> int:
    return int(_TIME.unpack(raw)[0]) - _SIGN


def escape(part: bytes) -> bytes:
    """An escaped part of a composite key, with its end mark."""
    return part.replace(b"\0", b"\0\1") + b"\0\0"


def split(raw: bytes) -> tuple[bytes, bytes]:
    """The first escaped part, and what follows it."""
    end = raw.find(b"\0\0")
    # A zero byte of the part is followed by 01, so the first pair of zero bytes is the end.
    return raw[:end].replace(b"\0\1", b"\0"), raw[end + 2 :]


def value_key(key: bytes) -> bytes:
    return VALUE + key


def map_key(key: bytes, name: bytes, entry: bytes = b"") -> bytes:
    """Row key of an entry. Without an entry: the prefix of all row keys of the map."""
    return MAP + escape(key) + escape(name) + entry


def map_parts(row_key: bytes) -> tuple[bytes, bytes, bytes]:
    """User key, name of the map and entry key of an ``m`` row."""
    key, rest = split(row_key[1:])
    name, entry = split(rest)
    return key, name, entry


def timer_key(key: bytes, name: bytes) -> bytes:
    return TIMER + escape(key) + name


def timer_parts(row_key: bytes) -> tuple[bytes, bytes]:
    """User key and timer's name of a ``t`` row."""
    return split(row_key[1:])


def timer_payload(clock: bytes, at_ms: int) -> bytes:
    """The payload of a ``t`` row. Clock: ``e`` for event time, ``p`` for processing time."""
    return clock + time_bytes(at_ms)


def timer_index(clock: bytes, at_ms: int, key: bytes, name: bytes) -> bytes:
    return TIMER_INDEX + clock + time_bytes(at_ms) + escape(key) + name


def timer_index_parts(row_key: bytes) -> tuple[bytes, int, bytes, bytes]:
    """Clock, time, user key and name of a ``T`` row."""
    key, name = split(row_key[10:])
    return row_key[1:2], time_of(row_key[2:10]), key, name


def expiry_index(at_ms: int, row_key: bytes) -> bytes:
    return EXPIRY_INDEX + time_bytes(at_ms) + row_key


def expiry_index_parts(row_key: bytes) -> tuple[int, bytes]:
    """Time and row key of an ``X`` row."""
    return time_of(row_key[1:9]), row_key[9:]


def due_of(row: bytes) -> int | None:
    """The event time at which a row is due. Such a row has no other fields."""
    return time_of(row[1:9]) if row[0] & IS_DUE else None


def due_index(at_ms: int, row_key: bytes) -> bytes:
    return DUE_INDEX + time_bytes(at_ms) + row_key


def due_index_parts(row_key: bytes) -> tuple[int, bytes]:
    """Time and row key of a ``D`` row."""
    return time_of(row_key[1:9]), row_key[9:]


def json_index(row_key: bytes) -> bytes | None:
    """The key of the index row of a ``v`` row whose key is a JSON document, but not in its canonical form; otherwise
    None. By this index, a key is found that has the same value in other bytes, such as other blanks or another order of
    fields. Numbers have none: most keys of digits are no JSON, or are in their canonical form.
    """
    key = row_key[1:]
    if key[:1] not in JSON_BEGINS:
        return None
    try:
        canonical = exact_json.canonical(key)
    except (ValueError, RecursionError):
        return None
    return None if canonical == key else json_forms(canonical) + key


def json_forms(canonical: bytes) -> bytes:
    """What the `json_index` of all keys of this value begins with."""
    return JSON_INDEX + escape(canonical)


def may_have_json_index(row_keys: Sequence[bytes]) -> Iterator[bytes]:
    """Those of sorted row keys that may have a `json_index`. Most tables have none, and this finds out at once."""
    for begin in JSON_BEGINS:
        first, behind = bisect_left(row_keys, VALUE + begin), bisect_left(row_keys, VALUE + bytes((begin[0] + 1,)))
        yield from row_keys[first:behind]


def after(prefix: bytes) -> bytes | None:
    """The smallest key that is greater than all keys with this prefix; None if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else None


def is_internal(row_key: bytes) -> bool:
    """Whether the row belongs to the internal topic. Otherwise it belongs to the table topic, or to none."""
    return row_key[:1] not in (VALUE, FILTER)


def with_index(changes: Changes, old_row: Callable[[bytes], bytes | None]) -> Iterator[tuple[bytes, bytes | None]]:
    """The changes, together with the changes of index rows that they cause.

    Args:
        changes: changes of ``v``, ``m`` and ``t`` rows, each row key once.
        old_row: returns the row as it was before the changes.
    """
    for row_key, row in changes:
        old = old_row(row_key)
        kind = row_key[:1]
        if kind == TIMER:
            key, name = timer_parts(row_key)
            if old is not None:
                payload = unpack(old).payload
                yield timer_index(payload[:1], time_of(payload[1:9]), key, name), None
            if row is not None:
                payload = unpack(row).payload
                yield timer_index(payload[:1], time_of(payload[1:9]), key, name), b""
        else:
            for time_in, index_key in ((expiry_of, expiry_index), (due_of, due_index)):
                before = time_in(old) if old is not None else None
                after_ms = time_in(row) if row is not None else None
                if before != after_ms:
                    if before is not None:
                        yield index_key(before, row_key), None
                    if after_ms is not None:
                        yield index_key(after_ms, row_key), b""
            if kind == VALUE and (old is None) != (row is None) and (found := json_index(row_key)) is not None:
                yield found, None if row is None else b""
        yield row_key, row


def new_index(changes: Iterable[tuple[bytes, bytes | None]]) -> Iterator[tuple[bytes, bytes | None]]:
    """The index rows of `with_index` for rows that are new: of ``v``, ``m`` and ``t`` rows that were not there before.

    It is much faster, because the parts of the rows are not taken apart: the bytes are in the same order in both.
    """
    for row_key, row in changes:
        if row:
            if row_key[:1] == TIMER:
                at = _TIMER_PAYLOAD if not row[0] else len(row) - len(unpack(row).payload)
                yield TIMER_INDEX + row[at : at + 9] + row_key[1:], b""
                continue
            if row[0] & INDEXED:
                yield (EXPIRY_INDEX if row[0] & HAS_EXPIRY else DUE_INDEX) + row[1:9] + row_key, b""
            if row_key[:1] == VALUE and (found := json_index(row_key)) is not None:
                yield found, b""
