"""Events in pairs from a seed, and what must come out of every version of the service. Pure: no Kafka, no Spark.

What is expected is what the seed says happened at each moment, never what a topic holds.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from onceflow_workshop.demos.audit import Expected, Message
from onceflow_workshop.demos.pairs_bad_records import VALUE_MAX, Bad, bad_record
from onceflow_workshop.demos.pairs_events import DISORDER_MS, EPOCH, SPELLINGS, START_MS, Event, Moment, timestamp

#: How long a singleton is waited for, and how late an event may be: the services say the same.
LATENESS_MS = 300_000
#: The closing events happen so long after the last record: all singletons before them are over then.
CLOSING_MS = 900_000
#: No more events per second of event time than this, so that many records mean a long time, not many at a time;
STEP_MS_MIN = 20  # between two moments, with two events each
#: and a short run lasts long enough for singletons to be over in the middle of it.
SPAN_MS_MIN = 1_800_000
#: Every so many bad records, one is large.
HUGE_EVERY = 40
SINGLE_SHARE = 0.03
DOUBLED_SHARE = 0.02
KEYLESS_SHARE = 0.05
#: Of the events that are sent once: they have no id, and write their timestamps in some other way.
PLAIN_SHARE = 0.2
BAD_SHARE = 0.02  # of moments and bad records together: one in a hundred records


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
            yield bad_record(f"bad-{number:09d}", at_ms, rng, huge=bad % HUGE_EVERY == 0)
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
    """The timestamp in a record of pairs or of unpaired events, as ``timestamp`` writes it."""
    try:
        text = json.loads(message.value or b"")["timestamp"].replace("Z", "+00:00")
        at = datetime.fromisoformat(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    return timestamp((at - EPOCH) // timedelta(milliseconds=1))


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


def max_moments(seed: int, count: int, partitions: int, *, records_per_batch: int) -> int:
    """How many moments a service that forgets what is over may have to remember at a time.

    Those of the allowed lateness and of the disorder, and of three batches: event time moves on between two batches,
    what is over is deleted in the next, and partitions may be one batch apart.
    """
    times = [part.at_ms for part in story(seed, count, partitions) if isinstance(part, Moment)]
    per_ms = len(times) / max(1, times[-1] - times[0])
    in_batches = 3 * records_per_batch * len(times) / count
    return min(len(times), int(per_ms * (LATENESS_MS + DISORDER_MS) + in_batches)) + 2 * partitions
