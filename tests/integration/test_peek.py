"""`onceflow.peek` and `onceflow peek`: beside a running flow, over aborted records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

import onceflow
from onceflow.cli.main import cli
from onceflow.errors import OptionError, UnknownTopicError
from onceflow.testing import independent

pytestmark = pytest.mark.integration


@pytest.fixture
def mixed(onceflow_broker: str, make_topic: Callable[..., str]) -> str:
    """Three partitions: 0 has 1, 3 and 5, then 300 aborted records; 1 has 2 and 4; 2 has none."""
    topic = make_topic("Peeked_at", 3)
    producer = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": f"{topic}-writer"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for at in range(1, 6):
        headers = [("h", b"x"), ("n", None)] if at == 5 else None
        value = None if at == 4 else str(at)
        producer.produce(topic, value, partition=1 - at % 2, timestamp=at * 1000, headers=headers)
    producer.commit_transaction(30)
    producer.begin_transaction()
    for _ in range(300):
        producer.produce(topic, "aborted", partition=0, timestamp=9_000)
    producer.flush(30)
    producer.abort_transaction(30)
    return topic


def seconds(frame: Any) -> list[int]:
    return [int(row.timestamp.timestamp()) for row in frame.collect()]


@pytest.mark.long
def test_what_is_taken(onceflow_spark: Any, onceflow_broker: str, mixed: str, make_topic: Callable[..., str]) -> None:
    def taken(**given: Any) -> list[int]:
        return seconds(onceflow.peek(onceflow_spark, mixed, bootstrap_servers=onceflow_broker, **given))

    assert taken() == [1, 2, 3, 4, 5]
    assert taken(last=3) == [3, 4, 5]
    assert taken(first=2) == [1, 2]
    assert taken(last=2, partitions=[0]) == [3, 5]
    assert taken(partitions=[2]) == []
    since = datetime.fromtimestamp(3, timezone.utc)
    assert (taken(since=since), taken(since=since, last=1), taken(since="1 hour")) == ([3, 4, 5], [5], [])
    with pytest.raises(OptionError, match="has no partition 3"):
        taken(partitions=[3])

    frame = onceflow.peek(onceflow_spark, mixed, bootstrap_servers=onceflow_broker)
    rows = frame.collect()
    assert [row.value for row in rows] == [b"1", b"2", b"3", None, b"5"]
    assert [(row.partition, row.offset, row.timestampType) for row in rows[:3]] == [(0, 0, 0), (1, 0, 0), (0, 1, 0)]
    assert rows[0].headers is None
    assert [tuple(header) for header in rows[4].headers] == [("h", b"x"), ("n", None)]
    reader = onceflow_spark.read.format("kafka").option("kafka.bootstrap.servers", onceflow_broker)
    reader = reader.option("subscribe", mixed).option("includeHeaders", True)
    theirs = reader.option("kafka.isolation.level", "read_committed").load()
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        (field.name, field.dataType.simpleString()) for field in theirs.schema
    ]
    assert sorted(map(repr, theirs.collect())) == sorted(map(repr, rows)), "as Spark reads them"

    nothing = onceflow.peek(onceflow_spark, make_topic("empty", 2), bootstrap_servers=onceflow_broker)
    assert (nothing.count(), nothing.schema) == (0, frame.schema)
    with pytest.raises(UnknownTopicError, match=f"did you mean {mixed}"):
        onceflow.peek(onceflow_spark, mixed.lower(), bootstrap_servers=onceflow_broker)


def test_the_example_of_the_page(onceflow_spark: Any, onceflow_broker: str, mixed: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
        if block.startswith("newest = onceflow.peek(")
    ]
    code = re.sub('"(validated|deposits)"', repr(mixed), code).replace("localhost:9092", onceflow_broker)
    names: dict[str, Any] = {"onceflow": onceflow, "spark": onceflow_spark}
    exec(code, names)  # noqa: S102
    assert names["newest"].count() == 5


def test_the_command(onceflow_broker: str, mixed: str) -> None:
    def lines(*options: str) -> list[str]:
        answer = CliRunner().invoke(cli, ["peek", mixed, "--bootstrap-servers", onceflow_broker, *options])
        assert (answer.exit_code, answer.stderr) == (0, ""), answer.output
        return answer.stdout.splitlines()

    assert lines() == ["null\t1", "null\t2", "null\t3", "null\tnull", "null\t5"]
    assert lines("--last", "1", "--headers") == ["null\t5\th=x, n=null"]
    assert [json.loads(line)["offset"] for line in lines("--json", "--partition", "1")] == [0, 1]
    empty = CliRunner().invoke(cli, ["peek", mixed, "--bootstrap-servers", onceflow_broker, "--partition", "2"])
    assert (empty.exit_code, empty.stderr) == (0, f"No committed records in {mixed}.\n")


@pytest.mark.long
def test_a_running_flow_goes_on(make_pipe: Any, onceflow_broker: str) -> None:
    pipe = make_pipe()
    pipe.fill(20)
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    try:
        query.processAllAvailable()
        look = partial(onceflow.peek, pipe.spark, bootstrap_servers=pipe.bootstrap)
        assert look(pipe.source).count() == look(pipe.target).count() == 20
        assert look("__onceflow_progress").where(f"CAST(key AS STRING) = '{pipe.flow}'").count() > 0
        pipe.fill(5)
        query.processAllAvailable()
        assert query.isActive
    finally:
        query.stop()
    pipe.check()
    assert len(independent.read_topic(onceflow_broker, pipe.target)) == 25
