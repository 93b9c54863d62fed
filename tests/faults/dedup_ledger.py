"""Records with ids for crash tests of ``Flow.deduplicate``, and an independent fold of what must have come out.

The fold knows which source offsets each committed batch had (from the progress topic), and nothing else of the flow.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from onceflow.testing import independent

WITHIN_MS, STEP_MS, REPEATED_FROM = 5_000, 10, 900
COLUMNS = ("get_json_object(string(value), '$.id') AS event", "bigint(get_json_object(string(value), '$.at')) AS at")
OPTIONS = {"id": "event", "event_time": "at", "within": "5 seconds", "idle_timeout": "1 hour"}


def inputs(first: int, count: int) -> list[tuple[bytes, bytes]]:
    """Half of the records repeat an id, some of them after it was forgotten; some records are late."""
    found = []
    for number in range(first, first + count):
        chance = random.Random(number)
        id_ = number if chance.random() < 0.5 else max(0, number - chance.randrange(1, REPEATED_FROM))
        at = 1_000_000 + number * STEP_MS - (WITHIN_MS + chance.randrange(5_000) if chance.random() < 0.02 else 0)
        value = {"n": number, "id": f"event-{id_:07d}", "at": at}
        found.append((b"key-%d" % (number % 16), json.dumps(value).encode()))
    return found


def fill(pipe: Any, count: int) -> None:
    more = inputs(len(pipe.sent), count)
    independent.fill(pipe.bootstrap, pipe.source, more)
    pipe.sent += more


@dataclass(frozen=True)
class Record:
    """A source record: number, id and event time, and where it is."""

    n: int
    id: str
    at: int
    partition: int
    offset: int


def records_of(pipe: Any) -> list[Record]:
    found = []
    for seen in independent.read_topic(pipe.bootstrap, pipe.source, decided=True):
        value = json.loads(seen.value or b"")
        found.append(Record(value["n"], value["id"], value["at"], seen.partition, seen.offset))
    return sorted(found, key=lambda record: (record.partition, record.offset))


def check(pipe: Any) -> None:
    """Outputs and table are those of the fold. Whatever passed first in a batch from several partitions may have."""
    history = pipe.committed_progress()
    source = records_of(pipe)
    passed = [
        json.loads(seen.value or b"")["n"] for seen in independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    ]
    assert len(passed) == len(set(passed)), "a record was written twice"
    stamps: dict[str, int] = {}
    latest: dict[int, int] = {}
    before: dict[int, int] = {}
    watermark, accounted = None, 0
    for progress in history:
        ends = progress.offsets[pipe.source]
        batch = [r for r in source if before.get(r.partition, 0) <= r.offset < ends[r.partition]]
        accounted += fold(batch, stamps, watermark, set(passed), progress.batch_id)
        for record in batch:
            latest[record.partition] = max(record.at, latest.get(record.partition, 0))
        if len(latest) == len(ends):
            watermark = min(latest.values()) - WITHIN_MS
        before = dict(ends)
    assert before == {
        partition: end for (_, partition), end in independent.end_offsets(pipe.bootstrap, pipe.source).items()
    }
    assert accounted == len(passed), f"{len(passed) - accounted} outputs are of no batch"
    check_table(pipe, stamps, watermark)


def fold(batch: list[Record], stamps: dict[str, int], watermark: int | None, passed: set[int], number: int) -> int:
    """One batch. Changes the stamps. Returns how many of its records pass."""
    candidates: dict[str, dict[int, Record]] = {}
    for record in batch:
        if watermark is None or record.at >= watermark:  # the others are late
            candidates.setdefault(record.id, {}).setdefault(record.partition, record)
        else:
            assert record.n not in passed, f"{record} is late in batch {number}"
    out = {record.n: record for record in batch if record.n in passed}
    expected = 0
    for id_, first in candidates.items():
        seen = stamps.get(id_)
        found = [record for record in out.values() if record.id == id_]
        if seen is not None and (watermark is None or seen >= watermark):
            assert not found, f"{found} repeats {id_} in batch {number}"
            continue
        assert len(found) == 1, f"{id_} is lost or doubled in batch {number}: {found}"
        assert found[0] in first.values(), f"{found} is not the first of its partition in batch {number}"
        stamps[id_] = found[0].at
        expected += 1
    return expected


def check_table(pipe: Any, stamps: dict[str, int], watermark: int | None) -> None:
    """Ids must have been deleted, too: batches take something of every partition, so whole segments are forgotten
    (``segments.py``)."""
    from onceflow import Table

    table: dict[str, int] = {}
    for seen in independent.read_topic(pipe.bootstrap, pipe.table, decided=True):
        id_ = (seen.key or b"").decode()
        if seen.value is None:
            assert table.pop(id_, None) is not None, f"{id_} is deleted twice"
        else:
            table[id_] = int.from_bytes(seen.value, "big")
    assert not {id_: ms for id_, ms in table.items() if stamps[id_] != ms}, "the table has other times"
    lacking = [id_ for id_, ms in stamps.items() if (watermark is None or ms >= watermark) and id_ not in table]
    assert not lacking, f"the table lacks {lacking[:3]}"
    assert len(table) < len(stamps), "no ids are deleted"
    stored = {key.decode(): int.from_bytes(value, "big") for key, value in Table.of_flow(pipe.folder).range()}
    assert stored == table, "the local copies differ from the topic"
