"""Flow.write_chain: a process step, a topic, a database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from sqlite_sink import SqliteSink

import onceflow
from onceflow import Record, serdes
from onceflow.testing import faults, independent

pytestmark = pytest.mark.integration


class Count(onceflow.Processor):
    """How many records each key has had."""

    state = output = serdes.LONG

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
        count = state.get(0) + sum(1 for _ in records)
        state.put(count)
        yield Record(key, count)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "counts.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE counts (name TEXT PRIMARY KEY, count INT CHECK (count % 3 <> 0))")
    return path


def rows_of(database: Path) -> dict[str, int]:
    with closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT name, count FROM counts"))


def test_a_chain(make_pipe: Callable[..., Any], make_topic: Callable[..., str], database: Path, inject: Any) -> None:
    """The second flow fails after a commit, which ends the chain; the next one continues both."""
    pipe, table, dead = make_pipe(), make_topic("counts", cleanup_policy="compact"), make_topic()
    pipe.fill(1000)

    def start(flow: onceflow.Flow, **options: Any) -> onceflow.FlowChain:
        counts = flow.process(flow.read(pipe.source, max_records_per_batch=300), Count(), table=f"{table}-state")
        return flow.write_chain(
            counts,
            SqliteSink(database, "counts", mode="upsert", key=["name"]),
            topic=pipe.target,
            rows=lambda changes: changes.selectExpr(
                "string(key) AS name", "key", "bigint(conv(hex(value), 16, 10)) AS count", "value", "offset"
            ),
            dead_letter_topic=dead,
            **options,
        ).start()

    inject("commit", "raise", batch=1, flow=f"{pipe.flow}.sink")
    with pipe.open() as flow:
        chain = start(flow, trigger="100 milliseconds")
        assert [query.flow for query in chain] == [pipe.flow, f"{pipe.flow}.sink"]
        with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at commit"):
            chain.awaitTermination(120)
        assert not any(query.isActive for query in chain)
    pipe.fill(500)
    with pipe.open() as flow:
        chain = start(flow, once=True)
        assert chain.awaitTermination(120)
    assert len(independent.read_topic(pipe.bootstrap, pipe.source)) == 1500
    applied: dict[str, int] = {}
    refused = []
    last: dict[bytes, int] = {}
    for change in independent.read_topic(pipe.bootstrap, pipe.target, decided=True):
        count = last[change.key] = int.from_bytes(change.value, "big")
        if count % 3:
            applied[change.key.decode()] = count
        else:
            refused.append((change.key, change.value))
    assert sum(last.values()) == 1500
    assert rows_of(database) == applied
    letters = independent.read_topic(pipe.bootstrap, dead, decided=True)
    assert refused
    assert sorted((letter.key, letter.value) for letter in letters) == sorted(refused)


def test_what_is_wrong_is_told_before_anything_runs(make_pipe: Callable[..., Any], database: Path) -> None:
    pipe = make_pipe()
    pipe.fill(10)
    with pipe.open() as flow:
        writer = flow.write_chain(
            flow.read(pipe.source),
            SqliteSink(database, "typo"),
            topic=pipe.target,
            rows=lambda changes: changes.selectExpr("string(key) AS key"),
        )
        with pytest.raises(onceflow.SchemaError, match="no table 'typo'"):
            writer.start()
        assert pipe.committed_progress() == []
