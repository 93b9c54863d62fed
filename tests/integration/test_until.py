"""Reads that end: ``Flow.read(until=...)``. Checked with an independent consumer."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer
from sqlite_sink import SqliteSink

import onceflow
from onceflow.testing import independent

pytestmark = pytest.mark.integration

TIME_MS = 1_700_000_000_000


def fill(bootstrap: str, topic: str, counts: list[int], *, first: int = 0) -> None:
    """Records with the values p:n in partition p, a second apart; the last second is n = first + count - 1."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition, count in enumerate(counts):
        for n in range(first, first + count):
            key = None if n % 5 == 0 else b"k%d" % n
            producer.produce(topic, b"%d:%d" % (partition, n), key, partition, timestamp=TIME_MS + 1000 * n)
            producer.poll(0)
    assert producer.flush(30) == 0


def values(pipe: Any, topic: str | None = None) -> list[bytes]:
    seen = independent.read_topic(pipe.bootstrap, topic or pipe.target, decided=True)
    return sorted(record.value for record in seen if record.value is not None)


def expected(ends: list[int]) -> list[bytes]:
    return sorted(b"%d:%d" % (partition, n) for partition, end in enumerate(ends) for n in range(end))


def start(pipe: Any, until: Any, **write: Any) -> Any:
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=100, until=until)
    return flow.write(source.select("key", "value"), topic=pipe.target, trigger="100 milliseconds", **write).start()


@pytest.mark.parametrize("later", [None, {0: 3}], ids=["an end that was dropped", "an end that came later"])
def test_a_dataframe_that_is_read_up_to_another_end_is_refused(pipe_of_one: Any, later: Any) -> None:
    """The one of an earlier cell of a notebook: its rows and the progress of the flow would not fit each other."""
    pipe = pipe_of_one
    with pipe.open() as flow:
        old = flow.read(pipe.source, until=None if later else "latest").where("value is not null")
        new = flow.read(pipe.source, until=later).where("value is not null")
        for rows in (old, old.union(new)):
            with pytest.raises(onceflow.UnsupportedQueryError, match="another until= than that of the last"):
                flow.write(rows.select("key", "value"), topic=pipe.target).start()
        query = flow.write(new.select("key", "value"), topic=pipe.target, once=later is None).start()
        query.awaitTermination(60)
    assert values(pipe) == expected([3 if later else 5])


@pytest.fixture
def pipe_of_one(make_pipe: Any) -> Any:
    pipe = make_pipe(partitions=1)
    fill(pipe.bootstrap, pipe.source, [5])
    return pipe


def test_it_ends_and_goes_on(make_pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By time, then by offsets, then by `latest`, then without an end: each record once, nothing behind a bound."""
    pipe = make_pipe(partitions=3)
    fill(pipe.bootstrap, pipe.source, [250, 40, 0])
    query = start(pipe, "2023-11-14T22:15:00Z", engine="tasks")  # 100 s after the first record
    query.awaitTermination(60)
    assert (query.isActive, query.condition) == (False, "stopped")
    assert query.is_complete
    assert values(pipe) == expected([100, 40, 0])
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow) == {
        (pipe.source, partition): end for partition, end in enumerate([100, 40, 0])
    }
    # The same bound again: it is reached. A partition that is behind its offset already stays where it is.
    query = start(pipe, "2023-11-14T22:15:00Z")
    query.awaitTermination(60)
    assert query.batches == []
    start(pipe, {0: 203, 1: 7, 2: 0}).awaitTermination(60)
    assert values(pipe) == expected([203, 40, 0])
    # What comes after Flow.read is behind `latest`. A service with such a query ends by itself.
    flow = pipe.open()
    source = flow.read(pipe.source, max_records_per_batch=20, until="latest")
    fill(pipe.bootstrap, pipe.source, [30, 30, 30], first=250)
    onceflow.serve(flow.write(source.select("key", "value"), topic=pipe.target))
    assert values(pipe) == expected([250, 40, 0])
    assert sum(json.loads(line)["records"] for line in capsys.readouterr().out.splitlines()) == 47
    with pytest.raises(onceflow.OptionError, match=r"until= of .*-0 is 999, the log ends at 280"):
        start(pipe, {0: 999, 1: 0, 2: 0})
    pipe.run()
    late = [b"%d:%d" % (partition, n) for partition in range(3) for n in range(250, 280)]
    assert values(pipe) == sorted([*expected([250, 40, 0]), *late])


def test_two_sources_and_what_is_refused(make_pipe: Any, make_topic: Any) -> None:
    pipe = make_pipe(partitions=2)
    second = make_topic("second", 1)
    fill(pipe.bootstrap, pipe.source, [20, 20])
    flow = pipe.open()
    with pytest.raises(onceflow.OptionError, match=r"until='tomorrow'(.|\n)*latest"):
        flow.read(pipe.source, until="tomorrow")
    with pytest.raises(onceflow.OptionError, match="a time to come"):
        flow.read(pipe.source, until="2999-01-01T00:00:00Z")
    one = flow.read(pipe.source, until={0: 5, 1: 6}).select("key", "value")
    endless = flow.read(second).select("key", "value")
    with pytest.raises(onceflow.OptionError, match=rf"never end(.|\n)*{second}"):
        flow.write(one.unionByName(endless), topic=pipe.target).start()
    flow.close()
    flow = pipe.open()
    one = flow.read(pipe.source, until={0: 5, 1: 6}).select("key", "value")
    with pytest.raises(onceflow.OptionError, match="checkpoint="):
        flow.write(one, topic=pipe.target, checkpoint=pipe.tmp_path / "checkpoint").start()
    sink = SqliteSink("rows.db", "rows")
    with pytest.raises(onceflow.OptionError, match=r"chain(.|\n)*once=True"):
        flow.write_chain(one, sink, topic=pipe.target, rows=lambda df: df)
    two = flow.read(second, until="latest").select("key", "value")  # it is empty
    flow.write(one.unionByName(two), topic=pipe.target).start().awaitTermination(60)
    assert values(pipe) == expected([5, 6])


@pytest.mark.long
def test_state_and_other_systems(make_state_pipe: Any, make_pipe: Any) -> None:
    """A step with a table, and an external sink, end at the same offsets."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(600)
    ends = independent.end_offsets(pipe.bootstrap, pipe.source)
    half = {partition: end // 2 for (_, partition), end in ends.items()}
    pipe.start(read={"until": half}).awaitTermination(60)
    assert len(pipe.outputs()) == sum(half.values())
    pipe.start(read={"until": "latest"}, engine="tasks").awaitTermination(60)
    pipe.check()

    plain = make_pipe(partitions=2)
    fill(plain.bootstrap, plain.source, [30, 30])
    database = plain.tmp_path / "rows.db"
    with closing(sqlite3.connect(database)) as created:
        created.execute("CREATE TABLE rows (v TEXT)")
    sink = SqliteSink(str(database), "rows")

    def run(until: Any) -> list[bytes]:
        flow = plain.open()
        rows = flow.read(plain.source, max_records_per_batch=7, until=until).selectExpr("CAST(value AS STRING) v")
        flow.write_external(rows, sink).start().awaitTermination(60)
        with closing(sqlite3.connect(database)) as connected:
            return sorted(v.encode() for (v,) in connected.execute("SELECT v FROM rows"))

    assert run({0: 10, 1: 3}) == expected([10, 3])
    assert run({0: 10, 1: 3}) == expected([10, 3])
    assert run("latest") == expected([30, 30])
