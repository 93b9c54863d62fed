"""Records of two streams in one topic for crash tests of joins by time, and what must have come out of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from confluent_kafka import Producer

from onceflow.testing import independent

START_MS, STEP_MS, LATENESS_MS = 1_700_000_000_000, 10, 500
BEFORE_MS, AFTER_MS, TOLERANCE_MS = 300, 700, 900
FIELDS = "get_json_object(string(value), '$.side') AS side", "bigint(get_json_object(string(value), '$.at')) AS at"
RESULT = (
    "key",
    (
        "to_json(struct(bigint(get_json_object(string(left_value), '$.n')) AS left, "
        "bigint(get_json_object(string(right_value), '$.n')) AS right)) AS value"
    ),
)
ENDS = b"end"

Results = Counter[tuple[int | None, int | None]]


def inputs(first: int, count: int) -> list[tuple[bytes, bytes]]:
    """Some records are late."""
    found = []
    for number in range(first, first + count):
        chance = random.Random(number)
        at = START_MS + number * STEP_MS - chance.randrange(LATENESS_MS)
        at -= 10 * LATENESS_MS if chance.random() < 0.02 else 0
        value = {"n": number, "side": chance.choice("lr"), "at": at}
        found.append((b"key-%d" % chance.randrange(40), json.dumps(value).encode()))
    return found


def fill(pipe: Any, count: int) -> None:
    more = inputs(len(pipe.sent), count)
    independent.fill(pipe.bootstrap, pipe.source, more)
    pipe.sent += more


def end(pipe: Any, number: int) -> None:
    """A record in every partition, which moves the watermark beyond all others."""
    producer = Producer({"bootstrap.servers": pipe.bootstrap})
    value = json.dumps({"n": -1, "side": "l", "at": START_MS + 10_000_000 + number}).encode()
    for _, partition in independent.end_offsets(pipe.bootstrap, pipe.source):
        producer.produce(pipe.source, value, ENDS, partition)
    assert producer.flush(30) == 0


def joined(flow: Any, source: Any, table: str, state_dir: Any, kind: str, late_topic: str) -> Any:
    """The step, and what is written of its results.

    Args:
        kind: ``interval`` or ``as-of``.
    """
    rows = source.selectExpr("*", *FIELDS).selectExpr(
        "key", "value", "timestamp_millis(at) AS timestamp", "topic", "partition", "offset", "side"
    )
    sides = (rows.where("side = 'l'").drop("side"), rows.where("side = 'r'").drop("side"))
    common = {
        "table": table,
        "state_dir": state_dir,
        "late_topic": late_topic,
        "allowed_lateness": LATENESS_MS / 1000,
        "idle_timeout": "1 hour",
    }
    if kind == "interval":
        found = flow.join_interval(*sides, before=BEFORE_MS / 1000, after=AFTER_MS / 1000, how="full", **common)
    else:
        found = flow.join_as_of(*sides, tolerance=TOLERANCE_MS / 1000, how="left", **common)
    return found.selectExpr(*RESULT)


def expected(pipe: Any, kind: str, late_topic: str) -> Results:
    late = {
        json.loads(seen.value or b"")["n"] for seen in independent.read_topic(pipe.bootstrap, late_topic, decided=True)
    }
    records = [(key, json.loads(raw)) for key, raw in pipe.sent]
    taken = [(key, each) for key, each in records if each["n"] not in late]
    assert 0 < len(records) - len(taken) < len(records) // 10, "some are late, and not many"
    lefts, rights = ([pair for pair in taken if pair[1]["side"] == side] for side in "lr")
    return by_interval(lefts, rights) if kind == "interval" else as_of(lefts, rights)


def by_interval(lefts: list[Any], rights: list[Any]) -> Results:
    found: Results = Counter()
    matched = set[int]()
    for key, left in lefts:
        partners = [
            right["n"]
            for other, right in rights
            if other == key and left["at"] - BEFORE_MS <= right["at"] <= left["at"] + AFTER_MS
        ]
        matched.update(partners)
        found.update((left["n"], partner) for partner in partners or [None])
    found.update((None, right["n"]) for _, right in rights if right["n"] not in matched)
    return found


def as_of(lefts: list[Any], rights: list[Any]) -> Results:
    found: Results = Counter()
    for key, left in lefts:
        earlier = [
            (right["at"], right["n"])
            for other, right in rights
            if other == key and left["at"] - TOLERANCE_MS <= right["at"] <= left["at"]
        ]
        found[left["n"], max(earlier)[1] if earlier else None] += 1
    return found


def check(pipe: Any, kind: str, late_topic: str) -> None:
    """Every result is there once, and no other."""
    seen: Results = Counter()
    for record in independent.read_topic(pipe.bootstrap, pipe.target, decided=True):
        if record.key != ENDS:
            row = json.loads(record.value or b"")
            seen[row.get("left"), row.get("right")] += 1
    must = expected(pipe, kind, late_topic)
    assert not must - seen, f"lost: {[*(must - seen)][:5]}"
    assert not seen - must, f"too many: {[*(seen - must)][:5]}"
