"""What a collection of a claim check finds while rows with references move to topics and partitions that it did not
know when it began. Kafka is a dictionary here: what happens while a topic is read is decided to the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onceflow
from onceflow.admin.records import claim_collector
from onceflow.admin.records.claim_collector import Collector
from onceflow.claim_check import objects
from onceflow.client.committed import Chunk
from onceflow.client.log_reader import LogRecord
from onceflow.client.settings import ClientSettings
from onceflow.protocol.progress import Progress, TableProgress

DAY_MS = 86_400_000

Rows = dict[int, tuple[bytes, bytes | None]]


@dataclass
class Log:
    """Partitions, with what happens when the first record of topic ``big`` is read."""

    rows: dict[tuple[str, int], Rows]
    flows: list[Progress]
    meanwhile: Callable[[Log], None]
    happened: bool = False

    # ---- a cluster

    def close(self) -> None: ...

    def topics(self, names: Any, deadline: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for topic, number in self.rows:
            found.setdefault(topic, SimpleNamespace(internal=False, leaders={})).leaders[number] = 1
        return found

    # ---- its functions

    def find_topics(self, cluster: Log, names: Mapping[str, str], deadline: Any) -> dict[str, Any]:
        return {name: self.topics(None, None)[name] for name in names}

    def find_topic(self, cluster: Log, name: str, right: str, deadline: Any) -> Any:
        return self.topics(None, None).get(name)

    def list_offsets(
        self, cluster: Log, partitions: Mapping[str, Sequence[int]], at: Any, deadline: Any, committed: bool = True
    ) -> dict[str, dict[int, int]]:
        def offset(rows: Rows) -> int:
            return 0 if at == claim_collector.EARLIEST else max(rows, default=-1) + 1

        return {topic: {n: offset(self.rows[topic, n]) for n in numbers} for topic, numbers in partitions.items()}

    def read(self, topic: str, number: int, start: int, end: int) -> Iterator[Chunk]:
        rows = [(at, *row) for at, row in sorted(self.rows[topic, number].items()) if start <= at < end]
        if topic == "big" and not self.happened:
            self.happened = True
            self.meanwhile(self)
        offsets = [np.array([row[0] for row in rows], dtype=np.int64)]
        yield Chunk(keys=[row[1] for row in rows], values=[row[2] for row in rows], next_offset=end, places=offsets)

    def read_log(self, cluster: Log, topic: str, number: int, start: int, end: int, deadline: Any) -> list[LogRecord]:
        rows = sorted(self.rows[topic, number].items())
        return [LogRecord(at, key, value, 0, -1, -1) for at, (key, value) in rows if start <= at < end]


def flow(key: str, *tables: str) -> Progress:
    ends = {name: {0: 9} for table in tables for name in (table, f"{table}-internal")}
    known = {table: TableProgress() for table in tables}
    return Progress(key, 1, {"big": {0: 3}}, {}, 1, changelogs=ends, tables=known)


def _gone(log: Log, value: bytes | None) -> None:
    """The flow goes on with the key, and compaction removes the row."""
    log.rows["t", 0][1] = (b"K", value)
    del log.rows["t", 0][0]


def nothing(log: Log) -> None: ...


def fork(log: Log) -> None:
    fork_that_copies(log)
    log.flows.append(flow("f2", "f2-t"))


def fork_that_copies(log: Log) -> None:
    """Its transaction is open: no progress names the copy."""
    log.rows["f2-t", 0], log.rows["f2-t-internal", 0] = dict(log.rows["t", 0]), {}
    _gone(log, b"new")


def repartition(log: Log) -> None:
    log.rows["t", 1], log.rows["t-internal", 1] = dict(log.rows["t", 0]), {}
    _gone(log, None)


def fork_and_repartition(log: Log) -> None:
    fork(log)
    log.rows["f2-t", 1], log.rows["f2-t-internal", 1] = dict(log.rows["f2-t", 0]), {}
    log.rows["f2-t", 0] = {1: (b"K", None)}


def lost(log: Log) -> None:
    _gone(log, b"new")


@pytest.mark.parametrize("topics", [["big", "t"], ["big"], None], ids=["named", "named by progress", "all"])
@pytest.mark.parametrize(
    "meanwhile",
    [nothing, fork, fork_that_copies, repartition, fork_and_repartition, lost],
    ids=lambda each: each.__name__,
)
def test_rows_that_move_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, topics: list[str] | None, meanwhile: Callable[[Log], None]
) -> None:
    now = int(time.time() * 1000)
    claims = onceflow.ClaimCheck(str(tmp_path), above=10)
    monkeypatch.setattr(objects, "clock_ms", lambda: now - 30 * DAY_MS)
    reference = claims.encode(b"a picture of thirty days ago")
    monkeypatch.setattr(objects, "clock_ms", lambda: now)
    rows: dict[tuple[str, int], Rows] = {
        ("big", 0): dict.fromkeys(range(3), (b"k", b"v")),
        ("t", 0): {0: (b"K", reference)},
        ("t-internal", 0): {},
    }
    log = Log(rows, [flow("f", "t")], meanwhile)
    monkeypatch.setattr(claim_collector, "Cluster", lambda settings: log)
    monkeypatch.setattr(claim_collector, "CommittedReader", lambda cluster, fetch_bytes: log)
    monkeypatch.setattr(claim_collector, "possible_progress", lambda cluster, deadline, unreadable: log.flows)
    for name in ("find_topics", "find_topic", "list_offsets", "read_log"):
        monkeypatch.setattr(claim_collector, name, getattr(log, name))
    with Collector(ClientSettings("none:1"), claims.objects, topics, older_than_ms=7 * DAY_MS, now_ms=now) as collector:
        found = collector.find()
        assert found.objects == 1
        assert found.orphans == (meanwhile is lost)
