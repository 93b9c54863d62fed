"""A flow that writes one partition of a table, its topics, and what the partition must hold."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from onceflow.state.format import rows
from onceflow.state.local.format import (
    COMMIT_RECORD,
    Chunk,
    CommitId,
    CommitRecord,
    Goal,
)
from onceflow.state.local.opening import Opened, open_partition, set_pending, settle
from onceflow.state.stores.base import Store
from onceflow_workshop.testing.columns import ReadsColumns

HOUR = 3_600_000
NOW = 1_700_000_000_000
Rows = dict[bytes, bytes]
Changes = list[tuple[bytes, "bytes | None"]]


@dataclass
class Part:
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: dict[int, list[tuple[str, bytes | None]]] = field(default_factory=dict)
    next_offset: int = 0


class Topics(ReadsColumns):
    """Committed records of one partition of a table topic and its internal topic; markers take offsets, too."""

    def __init__(self, chunk_size: int = 7) -> None:
        self.records: dict[str, dict[int, tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]] = {}
        self.ends = {"table": 0, "table-internal": 0}
        self.chunk_size = chunk_size
        self.read_from: list[tuple[str, int, int]] = []

    def append(self, topic: str, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]) -> None:
        self.records.setdefault(topic, {})[self.ends[topic]] = (key, value, headers)
        self.ends[topic] += 1

    def compact(self, topic: str, tombstones: bool = False) -> None:
        last = {key: offset for offset, (key, _, _) in self.records[topic].items()}
        self.records[topic] = {
            offset: record
            for offset, record in self.records[topic].items()
            if last[record[0]] == offset and not (tombstones and record[1] is None)
        }

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        self.read_from.append((topic, start, end))
        for low in range(start, end, self.chunk_size):
            part = Part(next_offset=min(end, low + self.chunk_size))
            for offset in range(low, part.next_offset):
                if offset in self.records.get(topic, {}):
                    key, value, headers = self.records[topic][offset]
                    if headers:
                        part.headers[len(part.keys)] = [*headers]
                    part.keys.append(key)
                    part.values.append(value)
            yield part

    def end(self, topic: str, partition: int) -> int:
        return self.ends[topic]


class Flow:
    """Commits batches to the topics and knows what the rows of the partition are."""

    def __init__(self, seed: int = 1, keys: int = 60, chunk_size: int = 7) -> None:
        self.topics = Topics(chunk_size)
        self.dice = random.Random(seed)
        self.keys = keys
        self.rows: Rows = {}
        self.batch = 0
        self.goal = Goal("flow", "table", 3, "id-t", "id-i", 0, 0)

    def changes(self, count: int = 30) -> Changes:
        """Of values, map entries and timers; some with expiry or version, some deletes. Keys are plain, JSON, long."""
        dice, found = self.dice, {}
        for _ in range(count):
            number = dice.randrange(self.keys)
            key = (b"key-%d\0", b'{"key": %d}', b'{"key":%d}', b"key" + b"-" * 600 + b"%d")[number % 4] % number
            kind = dice.choice("vvvmt")
            if kind == "t":
                row_key = rows.timer_key(key, b"timer")
                row = rows.pack(rows.timer_payload(dice.choice([b"e", b"p"]), NOW + dice.randrange(5)))
            else:
                row_key = rows.value_key(key) if kind == "v" else rows.map_key(key, b"map", b"entry")
                expires_ms = dice.choice([None, None, NOW + dice.randrange(-3, 3)])
                row = rows.pack(dice.randbytes(dice.randrange(40)), expires_ms, dice.choice([0, 0, 2]))
            found[row_key] = None if dice.random() < 0.2 else row
        return list(found.items())

    def commit(self, changes: Changes) -> Goal:
        """The batch becomes committed; what the driver knows then."""
        self.batch += 1
        apply(self.rows, changes)
        before = dict(self.topics.ends)
        for row_key, row in changes:
            self.append(row_key, row)
        for topic, end in self.topics.ends.items():
            self.topics.ends[topic] = end + (end > before[topic])  # the marker's offset
        ends = self.topics.ends
        commit = CommitId(self.batch, 9, 1)
        self.goal = replace(self.goal, table_end=ends["table"], internal_end=ends["table-internal"], last=commit)
        return self.goal

    def append(self, row_key: bytes, row: bytes | None) -> None:
        if rows.is_internal(row_key):
            self.topics.append("table-internal", row_key, row, [])
        elif row is None:
            self.topics.append("table", row_key[1:], None, [])
        else:
            parts = rows.unpack(row)
            self.topics.append("table", row_key[1:], parts.payload, rows.record_headers(parts))

    def run(self, folder: Path, opener: type[Store], *, committed: bool = True, settled: bool = False) -> Goal:
        """One batch as a task runs it: open, change, write to Kafka, leave pending."""
        opened = self.open(folder, opener)
        changes = self.changes()
        before = self.goal
        goal = self.commit(changes)
        assert goal.last is not None
        set_pending(opened.store, before, goal.last, changes, goal.table_end, goal.internal_end)
        opened.store.close()
        if settled:
            assert settle(folder, opener, goal.last)
        return goal

    def open(self, folder: Path, opener: type[Store], *, verify: bool = False, now_ms: int = NOW) -> Opened:
        return open_partition(
            folder,
            opener,
            self.goal,
            self.topics,
            verify=verify,
            now_ms=now_ms,
        )

    def check(self, opened: Opened) -> None:
        """The store holds all of it and nothing else, indexes included."""
        wanted, keys = indexed(tuple(self.rows.items()))
        assert dict(opened.store.scan(b"")) == wanted
        assert opened.store.get_many(keys) == [wanted[key] for key in keys]
        assert opened.store.checksum_holds()
        commit_record = CommitRecord.decode(opened.store.blob(COMMIT_RECORD) or b"")
        assert commit_record is not None
        assert commit_record.at(self.goal)
        opened.store.close()


@functools.lru_cache(maxsize=4)
def indexed(held: tuple[tuple[bytes, bytes], ...]) -> tuple[Rows, list[bytes]]:
    """These rows and those of their indexes, and all keys in order."""
    found = dict(rows.with_index(held, {}.get))
    return found, sorted(found)


def apply(held: Rows, changes: Changes) -> None:
    for key, row in changes:
        if row is None:
            held.pop(key, None)
        else:
            held[key] = row
