"""Events in pairs from a seed, and what must come out of every version of the service. Pure: no Kafka, no Spark.

What is expected is what the seed says happened at each moment, never what a topic holds.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from onceflow.demos.audit import Expected, Message

#: Event time begins here. It is fixed, so that a seed always makes the same records.
START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
#: How long a singleton is waited for, and how late an event may be: the services say the same.
LATENESS_MS = 300_000
#: An event comes up to this long after it has happened.
DISORDER_MS = 120_000
#: The closing events happen so long after the last record: all singletons before them are over then.
CLOSING_MS = 900_000
#: No more events per second of event time than this, so that many records mean a long time, not many at a time;
STEP_MS_MIN = 20  # between two moments, with two events each
#: and a short run lasts long enough for singletons to be over in the middle of it.
SPAN_MS_MIN = 1_800_000
SINGLE_SHARE = 0.03
DOUBLED_SHARE = 0.02
KEYLESS_SHARE = 0.05
#: Of the events that are sent once: they have no id, and write their timestamps in some other way.
PLAIN_SHARE = 0.2
BAD_SHARE = 0.02  # of moments and bad records together: one in a hundred records
#: Every so many bad records, one is large.
HUGE_EVERY = 40
HUGE_CHARACTERS = 300_000
VALUE_MAX = 1_000_000

NOT_JSON = "not JSON"
NO_OBJECT = "not a JSON object"
BAD_ID = "id must be a text of 1 to 64 characters, if it is there"
BAD_TYPE = "type must be A or B"
BAD_VALUE = "value must be a whole number below 10^15"
NO_TIME = "timestamp must be like 2026-01-31 23:59:59 or 2026-01-31T23:59:59.999Z"
ABSURD_TIME = "timestamp is more than a minute after the record's own"
LONG_KEY = "the key is too long"
TWICE = "a field is there twice"
CAUSES = (NOT_JSON, NO_OBJECT, BAD_ID, BAD_TYPE, BAD_VALUE, NO_TIME, ABSURD_TIME, LONG_KEY, TWICE)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Event(NamedTuple):
    """One event as it should be.

    Args:
        copies: how often it is sent.
        spelling: of its timestamp, one of ``SPELLINGS``; but for the first, it does not tell its id.
    """

    id: str
    type: str
    at_ms: int
    value: int
    copies: int = 1
    spelling: int = 0

    @property
    def encoded(self) -> bytes:
        name = "" if self.spelling else f'"id":"{self.id}",'
        at = SPELLINGS[self.spelling](self.at_ms)
        return f'{{{name}"type":"{self.type}","timestamp":"{at}","value":{self.value}}}'.encode()


class Moment(NamedTuple):
    """What happened at one time: two events, or one."""

    at_ms: int
    a: Event | None
    b: Event | None


class Bad(NamedTuple):
    """A record that is no event.

    Args:
        at_ms: when it is made.
        cause: why it is none.
        told: the timestamp as a reader of JSON finds it; None: there is none.
    """

    id: str
    at_ms: int
    cause: str
    value: bytes | None
    told: str | None


class Arrival(NamedTuple):
    """One record as it is produced.

    Args:
        at_ms: its own timestamp.
        bad: id of a bad record.
    """

    partition: int
    key: bytes | None
    value: bytes | None
    at_ms: int
    bad: str | None = None


# ---- what happens --------------------------------------------------------------------------------------


def story(seed: int, count: int, partitions: int) -> Iterator[Moment | Bad]:
    """Moments in the order of their times, and bad records in between. With ``closing`` they make ``count`` records."""
    rng = random.Random(f"pairs-{seed}")
    chance = rng.random  # looked up once: this loop makes a million records
    room = count - 2 * partitions
    step_ms = max(STEP_MS_MIN, 2 * SPAN_MS_MIN // count)
    at_ms, number, moments, bad = START_MS, 0, 0, 0
    while room > 0:
        number += 1
        if chance() < BAD_SHARE:
            bad += 1
            room -= 1
            # At a moment where there may be good ones: a bad event must not do harm to a good one of its timestamp.
            yield _bad(f"bad-{number:09d}", at_ms, rng, huge=bad % HUGE_EVERY == 0)
            continue
        at_ms = START_MS + moments * step_ms + int(chance() * step_ms)
        moments += 1
        # Four is what a pair takes if both are sent twice.
        which = rng.choice("AB") if room < 4 or chance() < SINGLE_SHARE else "AB"
        made: dict[str, Event] = {}
        for kind in which:
            copies = 2 if room >= 4 and chance() < DOUBLED_SHARE else 1
            value = int(chance() * 2 * VALUE_MAX) - VALUE_MAX
            spelling = rng.randrange(1, len(SPELLINGS)) if copies == 1 and chance() < PLAIN_SHARE else 0
            made[kind] = Event(f"evt-{number:09d}{kind.lower()}", kind, at_ms, value, copies, spelling)
        room -= sum(event.copies for event in made.values())
        yield Moment(at_ms, made.get("A"), made.get("B"))


def arrivals(seed: int, count: int, partitions: int) -> Iterator[Arrival]:
    """All records in the order in which they come: each a while after it has happened; at the end the closing events.

    One partition after the other gets a record, so all of them are at about the same event time.
    """
    number = 0
    for number, (at_ms, key, value, bad) in enumerate(_in_order(seed, count, partitions)):
        yield Arrival(number % partitions, key, value, at_ms, bad)
    for event in closing(seed, count, partitions):
        number += 1
        yield Arrival((event.at_ms % 1000) // 2, event.id.encode(), event.encoded, event.at_ms)


def closing(seed: int, count: int, partitions: int) -> Iterator[Event]:
    """Two single events for each partition, long after all others: they bring event time past these.

    Nothing comes after them, so nobody ever knows whether they stay single.
    """
    last_ms = START_MS
    for part in story(seed, count, partitions):
        last_ms = part.at_ms
    # Whole seconds, and the number of the event in the milliseconds.
    base_ms = (last_ms + DISORDER_MS + CLOSING_MS) // 1000 * 1000
    for number in range(2 * partitions):
        yield Event(f"end-{number:09d}", "AB"[number % 2], base_ms + number, number)


def _in_order(seed: int, count: int, partitions: int) -> Iterator[tuple[int, bytes | None, bytes | None, str | None]]:
    """Time, key, value and id (if it is bad) of all records but the closing ones."""
    rng = random.Random(f"arrivals-{seed}")
    chance = rng.random
    waiting: list[tuple[int, int, bytes | None, bytes | None, str | None]] = []
    number = 0  # also keeps the heap from comparing keys
    for part in story(seed, count, partitions):
        while waiting and waiting[0][0] <= part.at_ms:
            at_ms, _, key, value, bad = heapq.heappop(waiting)
            yield at_ms, key, value, bad
        if isinstance(part, Bad):
            number += 1
            record = (part.at_ms + int(chance() * DISORDER_MS), number, part.id.encode(), part.value, part.id)
            heapq.heappush(waiting, record)
            continue
        for event in (part.a, part.b):
            if event is not None:
                name = None if chance() < KEYLESS_SHARE else event.id.encode()
                for _ in range(event.copies):
                    number += 1
                    later_ms = event.at_ms + int(chance() * DISORDER_MS)
                    heapq.heappush(waiting, (later_ms, number, name, event.encoded, None))
    while waiting:
        at_ms, _, key, value, bad = heapq.heappop(waiting)
        yield at_ms, key, value, bad


# ---- what must come out --------------------------------------------------------------------------------


def expected_pairs(parts: Iterable[Moment | Bad]) -> Iterator[Expected]:
    """The sum for each moment with both events."""
    for part in parts:
        if isinstance(part, Moment) and part.a is not None and part.b is not None:
            at = timestamp(part.at_ms)
            value = f'{{"timestamp":"{at}","sum":{part.a.value + part.b.value}}}'
            yield Expected(at, at.encode(), value.encode())


def expected_unpaired(parts: Iterable[Moment | Bad]) -> Iterator[Expected]:
    """The event of each moment with only one."""
    for part in parts:
        if isinstance(part, Moment) and (part.a is None or part.b is None):
            event = part.a or part.b
            if event is not None:
                at = timestamp(part.at_ms)
                yield Expected(at, at.encode(), event.encoded)


def identify(message: Message) -> str | None:
    """The timestamp that a record of pairs or of unpaired events tells, as ``timestamp`` writes it."""
    try:
        told = json.loads(message.value or b"")["timestamp"].replace("Z", "+00:00")
        at = datetime.fromisoformat(told)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    return timestamp((at - _EPOCH) // timedelta(milliseconds=1))


def bad_records(parts: Iterable[Moment | Bad]) -> dict[str, Bad]:
    """By id."""
    return {part.id: part for part in parts if isinstance(part, Bad)}


class Rows(NamedTuple):
    """Live keys of a compacted topic: the sum over its partitions, each at its fullest, and at the end."""

    peak: int
    last: int


def live_rows(messages: Iterable[Message]) -> Rows:
    """How many keys of a compacted topic were live over its time.

    Args:
        messages: in offset order per partition. What compaction has removed is not seen.
    """
    live: dict[int, set[bytes]] = {}
    peaks: dict[int, int] = {}
    for message in messages:
        keys = live.setdefault(message.partition, set())
        if message.value is None:
            keys.discard(message.key or b"")
        else:
            keys.add(message.key or b"")
            peaks[message.partition] = max(len(keys), peaks.get(message.partition, 0))
    return Rows(sum(peaks.values()), sum(map(len, live.values())))


def moments_at_most(seed: int, count: int, partitions: int, *, records_per_batch: int) -> int:
    """How many moments a service that forgets what is over may have to remember at a time.

    Those of the allowed lateness and of the disorder, and of three batches: event time moves on between two batches,
    what is over is deleted in the next, and partitions may be one batch apart.
    """
    times = [part.at_ms for part in story(seed, count, partitions) if isinstance(part, Moment)]
    per_ms = len(times) / max(1, times[-1] - times[0])
    in_batches = 3 * records_per_batch * len(times) / count
    return min(len(times), int(per_ms * (LATENESS_MS + DISORDER_MS) + in_batches)) + 2 * partitions


def timestamp(at_ms: int) -> str:
    """As outputs write it, and most events."""
    return _text(at_ms) + "Z"


def _text(at_ms: int) -> str:
    seconds, ms = divmod(at_ms, 1000)
    return f"{_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{ms:03d}"


def _at_offset(sign: str, minutes: int) -> Callable[[int], str]:
    """As a clock writes it that is so much ahead of UTC, or behind."""
    ahead_ms = (minutes if sign == "+" else -minutes) * 60_000
    return lambda at_ms: f"{_text(at_ms + ahead_ms)}{sign}{minutes // 60:02d}:{minutes % 60:02d}"


#: Ways to write a timestamp that mean the same.
SPELLINGS: tuple[Callable[[int], str], ...] = (
    timestamp,
    lambda at_ms: _text(at_ms).replace("T", " "),
    lambda at_ms: f"{_text(at_ms)}000",
    _at_offset("+", 330),
    _at_offset("-", 720),
)


# ---- bad records ---------------------------------------------------------------------------------------


def _bad(identity: str, at_ms: int, rng: random.Random, *, huge: bool) -> Bad:
    kind = rng.choice(_HUGE if huge else _KINDS)
    at = timestamp(at_ms)
    fields = {"id": identity, "type": rng.choice("AB"), "timestamp": at, "value": rng.randrange(VALUE_MAX)}
    return kind(Bad(identity, at_ms, "", b"", at), fields, rng)


_Fields = dict[str, object]
_Kind = Callable[[Bad, _Fields, random.Random], Bad]
_MISSING = object()


def _no_value(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=NO_OBJECT, value=None, told=None)


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
    return bad._replace(cause=NOT_JSON, value=value, told=bad.told if value == whole + b"," + whole else None)


def _no_object(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    value = rng.choice([b"[1,2]", f'"{bad.id}"'.encode(), b"17", b"true", b"null", b"[" + _json(fields) + b"]"])
    return bad._replace(cause=NO_OBJECT, value=value, told=None)


def _twice(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    whole, field = _json(fields), rng.choice(list(fields))
    again = _json({field: fields[field]})
    return bad._replace(cause=TWICE, value=whole[:-1] + b"," + again[1:], told=None)


def _with(cause: str, name: str, values: Iterable[object]) -> _Kind:
    """Bad for one field, which has one of these values."""
    choices = list(values)

    def make(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
        chosen = rng.choice(choices)
        changed = {field: value for field, value in fields.items() if field != name}
        if chosen is not _MISSING:
            changed[name] = chosen
        told = changed.get("timestamp")
        return bad._replace(cause=cause, value=_json(changed), told=None if told is None else str(told))

    return make


def _absurd_time(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    year_ms, day_ms = 365 * 86_400_000, 86_400_000
    at = rng.choice(
        [
            "9999-12-31T23:59:59.999Z",
            timestamp(bad.at_ms + 10 * year_ms),
            timestamp(bad.at_ms + 2 * day_ms),
            # A record comes at most this much later than what it tells of, and the services allow a minute.
            timestamp(bad.at_ms + DISORDER_MS + 61_000),
        ]
    )
    return bad._replace(cause=ABSURD_TIME, value=_json({**fields, "timestamp": at}), told=at)


def _huge_id(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=BAD_ID, value=_json({**fields, "id": bad.id * (HUGE_CHARACTERS // len(bad.id))}))


def _huge_timestamp(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    at = "2" * HUGE_CHARACTERS
    return bad._replace(cause=LONG_KEY, value=_json({**fields, "timestamp": at}), told=at)


def _huge_text(bad: Bad, fields: _Fields, rng: random.Random) -> Bad:
    return bad._replace(cause=NOT_JSON, value=b"\x00" * HUGE_CHARACTERS, told=None)


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
