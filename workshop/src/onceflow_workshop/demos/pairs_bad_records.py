"""Records of the demo ``pairs`` that are no events, and why."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from onceflow_workshop.demos.pairs_events import DISORDER_MS, START_MS, timestamp

HUGE_CHARACTERS = 300_000
VALUE_MAX = 1_000_000

NOT_JSON = "not JSON"
NO_OBJECT = "not a JSON object"
BAD_ID = "id must be a text of 1 to 64 characters, if it is there"
BAD_TYPE = "type must be A or B"
BAD_VALUE = "value must be a whole number below 10^15"
NO_TIME = "timestamp must be like 2026-01-31 23:59:59 or 2026-01-31T23:59:59.999Z"
ABSURD_TIME = "timestamp is more than a minute after the record's own"
TWICE = "a field is there twice"
CAUSES = (NOT_JSON, NO_OBJECT, BAD_ID, BAD_TYPE, BAD_VALUE, NO_TIME, ABSURD_TIME, TWICE)


class Bad(NamedTuple):
    """A record that is no event.

    Args:
        at_ms: when it is made.
        cause: why it is none.
        timestamp: as a reader of JSON finds it; None: there is none.
    """

    id: str
    at_ms: int
    cause: str
    value: bytes | None
    timestamp: str | None


def bad_record(identity: str, at_ms: int, rng: random.Random, *, huge: bool) -> Bad:
    """One that is made at a time, for a cause that is drawn by lot."""
    kind = rng.choice(_HUGE if huge else _KINDS)
    at = timestamp(at_ms)
    fields = {"id": identity, "type": rng.choice("AB"), "timestamp": at, "value": rng.randrange(VALUE_MAX)}
    return kind(Bad(identity, at_ms, "", b"", at), fields, rng)


_Fields = dict[str, object]
_Kind = Callable[[Bad, _Fields, random.Random], Bad]
_MISSING = object()


def _no_value(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=NO_OBJECT, value=None, timestamp=None)


def _not_json(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    whole = _json(fields)
    value = rng.choice(
        [
            b"",
            whole[: rng.randint(1, len(whole) - 1)],
            whole + b"}",
            whole + whole,
            whole + b"," + whole,
            b"event " + bad.id.encode(),
            b"\xff\xfe" + whole,
            whole.replace(b"bad", b"b\xffd"),
        ]
    )
    # Of two events with a comma in between, the services find the first one's timestamp.
    return bad._replace(cause=NOT_JSON, value=value, timestamp=bad.timestamp if value == whole + b"," + whole else None)


def _no_object(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    value = rng.choice([b"[1,2]", f'"{bad.id}"'.encode(), b"17", b"true", b"null", b"[" + _json(fields) + b"]"])
    return bad._replace(cause=NO_OBJECT, value=value, timestamp=None)


def _twice(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    whole, field = _json(fields), rng.choice(list(fields))
    again = _json({field: fields[field]})
    return bad._replace(cause=TWICE, value=whole[:-1] + b"," + again[1:], timestamp=None)


def _with(cause: str, name: str, values: Iterable[object]) -> _Kind:
    """Bad for one field, which has one of these values."""
    choices = list(values)

    def make(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
        chosen = rng.choice(choices)
        changed = {field: value for field, value in fields.items() if field != name}
        if chosen is not _MISSING:
            changed[name] = chosen
        text = changed.get("timestamp")
        return bad._replace(cause=cause, value=_json(changed), timestamp=None if text is None else str(text))

    return make


def _absurd_time(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    year_ms, day_ms = 365 * 86_400_000, 86_400_000
    at = rng.choice(
        [
            "9999-12-31T23:59:59.999Z",
            timestamp(bad.at_ms + 10 * year_ms),
            timestamp(bad.at_ms + 2 * day_ms),
            # A record comes at most this much later than its event, and the services allow a minute.
            timestamp(bad.at_ms + DISORDER_MS + 61_000),
        ]
    )
    return bad._replace(cause=ABSURD_TIME, value=_json({**fields, "timestamp": at}), timestamp=at)


def _huge_id(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=BAD_ID, value=_json({**fields, "id": bad.id * (HUGE_CHARACTERS // len(bad.id))}))


def _huge_timestamp(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    at = "2" * HUGE_CHARACTERS
    return bad._replace(cause=NO_TIME, value=_json({**fields, "timestamp": at}), timestamp=at)


def _huge_text(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=NOT_JSON, value=b"\x00" * HUGE_CHARACTERS, timestamp=None)


_HUGE: tuple[_Kind, ...] = (_huge_id, _huge_timestamp, _huge_text)
_KINDS: tuple[_Kind, ...] = (
    _no_value,
    _not_json,
    _no_object,
    _twice,
    _with(BAD_ID, "id", [17, False, "", ["evt"], True, "x" * 65]),
    _with(BAD_TYPE, "type", [_MISSING, None, "C", "a", 1, "", ["A"], "AB"]),
    _with(BAD_VALUE, "value", [_MISSING, None, "12", 1.5, 12.0, True, 10**15, -(10**18), -(2**63), 10**30, [1]]),
    _with(
        NO_TIME,
        "timestamp",
        [
            _MISSING,
            None,
            "",
            "yesterday",
            "2026-02-30T00:00:00.000Z",
            "2026-01-01T24:00:00.000Z",
            "2026-01-01T00:00Z",
            "2026-01-01 00:00:00.000 +01:00",
            "2026-01-01T00:00:00.0000000Z",
            "2026-01-01T00:00:00.000+15:00",
            "2026-01-01T00:00:00.000+0100",
            "\u0662\u0660\u0662\u0666-01-01T00:00:00.000Z",
            "2026-01-01T00:00:00.000Z\n",
            START_MS,
        ],
    ),
    _absurd_time,
)


def _json(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
