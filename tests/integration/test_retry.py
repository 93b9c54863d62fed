"""`Retry.by_origin` on Spark: which letters are told apart how, and a flow that retries on a real Kafka."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

import onceflow
from onceflow.cli.main import cli
from onceflow.errors import SchemaError
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

SCHEMA = (
    "key binary, value binary, headers array<struct<key:string,value:binary>>, "
    "topic string, partition int, offset bigint, timestamp timestamp"
)


def headers(topic: bytes | None, partition: bytes | None, offset: bytes | None, *more: Any) -> list[Any]:
    return [
        ("onceflow.origin.topic", topic),
        ("onceflow.origin.partition", partition),
        ("onceflow.origin.offset", offset),
        *more,
    ]


def test_letters_get_their_origins_as_keys(onceflow_spark: Any) -> None:
    cases: list[tuple[bytes | None, Any, str]] = [
        (b"ada", headers(b"orders", b"3", b"17"), "orders/3/17"),
        (None, headers(b"a.b_c-d", b"0", b"9223372036854775807"), "a.b_c-d/0/9223372036854775807"),
        # The last header of a name counts.
        (b"ada", [*headers(b"x", b"1", b"1"), *headers(b"orders", b"3", b"18")], "orders/3/18"),
        # What is no origin: the letter's own place.
        (b"ada", None, "failed/1/3"),
        (b"ada", [], "failed/1/4"),
        (b"ada", headers(b"orders", b"3", b"17")[:2], "failed/1/5"),
        (b"ada", headers(b"orders", b"3", None), "failed/1/6"),
        (b"ada", headers(b"or/ders", b"3", b"17"), "failed/1/7"),
        (b"ada", headers(b"orders\n", b"3", b"17"), "failed/1/8"),
        (b"ada", headers(b"orders", b"3", b"17\n"), "failed/1/9"),
        (b"ada", headers(b"orders", b"-3", b"17"), "failed/1/10"),
        (b"ada", headers(b"", b"3", b"17"), "failed/1/11"),
        (b"ada", headers(b"\xff\xfe", b"3", b"17"), "failed/1/12"),
        (b"ada", headers(b"o" * 250, b"3", b"17"), "failed/1/13"),
        (b"ada", headers(b"orders", b"3", b"1" * 20), "failed/1/14"),
    ]
    rows = [(key, b"v", given, "failed", 1, offset, None) for offset, (key, given, _) in enumerate(cases)]
    found = onceflow.Retry.by_origin(onceflow_spark.createDataFrame(rows, SCHEMA)).orderBy("offset").collect()
    assert [row.key for row in found] == [identity for _, _, identity in cases]
    assert [row.value for row in found] == [b"v"] * len(cases)
    own = [[bytes(each.value) for each in row.headers if each.key == "onceflow.key"] for row in found]
    assert own == [[] if key is None else [key] for key, _, _ in cases]


def test_headers_are_kept_but_those_that_are_not_the_records(onceflow_spark: Any) -> None:
    given = headers(
        b"o", b"0", b"1", ("a", None), ("onceflow.key", b"false"), ("onceflow.value.null", b"true"), ("a", b"2")
    )
    df = onceflow_spark.createDataFrame([(b"", None, given, "failed", 0, 0, None)], SCHEMA)
    (row,) = onceflow.Retry.by_origin(df).collect()
    assert [(each.key, each.value) for each in row.headers] == [
        *headers(b"o", b"0", b"1"),
        ("a", None),
        ("a", b"2"),
        ("onceflow.key", b""),
    ]


def test_letters_without_headers_are_refused(onceflow_spark: Any) -> None:
    df = onceflow_spark.createDataFrame([], SCHEMA).drop("headers")
    with pytest.raises(SchemaError, match="include_headers=True"):
        onceflow.Retry.by_origin(df)


def test_letters_come_back_when_nothing_else_arrives(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Any
) -> None:
    """A record without key and value, and one that is no letter and has no time; timers fire without input."""
    # The broker must not delete what has timestamps of long ago.
    failed, again, parked = (
        make_topic(name, count, retention_ms=-1) for name, count in (("failed", 2), ("retry", 3), ("parked", 1))
    )
    producer = Producer({"bootstrap.servers": onceflow_broker, "log_level": 0})
    told = headers(b"orders", b"3", b"17", ("onceflow.error.class", b"OSError"), ("onceflow.attempt", b"1"))
    producer.produce(failed, None, None, headers=told, partition=0, timestamp=1_700_000_000_000)
    producer.produce(failed, b"v", b"k", partition=1, timestamp=-1)
    producer.produce(failed, b"v", b"k", headers=[("onceflow.error.class", b"KeyError")], partition=1)
    producer.flush(30)
    flow = onceflow.Flow(f"flow-{failed}", onceflow_spark, bootstrap_servers=onceflow_broker)
    letters = onceflow.Retry.by_origin(flow.read(failed, include_headers=True))
    policy = onceflow.Retry(retry_topic=again, parked_topic=parked, base="2 seconds", jitter=0, permanent={"KeyError"})
    rows = flow.process(letters, policy, table=f"waiting-{failed}", state_dir=tmp_path)

    def both_there() -> list[independent.Seen]:
        seen = independent.read_topic(onceflow_broker, again, decided=True)
        return seen if len(seen) >= 2 else []

    query = flow.write(rows, trigger="100 milliseconds").start()
    try:
        query.processAllAvailable()
        (table,) = query.tables
        assert table.waiting_letters
        assert table.rows in ({"value": 2, "entry": 0, "timer": 2}, {"value": 0, "entry": 0, "timer": 0})
        seen = wait_until(both_there, 30, "both records are tried again", useless=lambda: query.failure, poll_s=0.1)
        wait_until(lambda: query.tables[0].rows["value"] == 0, 30, "no letter waits any more")
    finally:
        query.stop()

    def letters_of_the_flow() -> Any:
        call = ["status", flow.name, "--tables", "--json", "--bootstrap-servers", onceflow_broker]
        answer = CliRunner().invoke(cli, call)
        assert answer.exit_code == 0, answer.output
        return [(each["topic"], each["role"], each["waiting"]) for each in json.loads(answer.stdout)["letters"]]

    assert letters_of_the_flow() == [(parked, "parked", 1)]
    drop = ["parked", "drop", parked, "--all", "--yes", "--bootstrap-servers", onceflow_broker]
    assert CliRunner().invoke(cli, drop).exit_code == 0
    assert letters_of_the_flow() == [(parked, "parked", 0)]
    found = {dict(each.headers)["onceflow.origin.topic"]: each for each in seen}
    assert found.keys() == {b"orders", failed.encode()}
    assert (found[b"orders"].key, found[b"orders"].value, found[b"orders"].timestamp_ms) == (
        None,
        None,
        1_700_000_000_000,
    )
    assert dict(found[b"orders"].headers) == {**dict(told), "onceflow.retry.topic": again.encode()}
    assert (found[failed.encode()].key, found[failed.encode()].value) == (b"k", b"v")
    assert found[failed.encode()].timestamp_ms > 1_700_000_000_000
    given_up, dropped = independent.read_topic(onceflow_broker, parked, decided=True)
    assert (dropped.key, dropped.value) == (given_up.key, None)
    assert (given_up.key or b"").startswith(f"{failed}/1/1/".encode())
    assert dict(given_up.headers)["onceflow.key"] == b"k"
    rest = independent.read_topic(onceflow_broker, f"waiting-{failed}", decided=True)
    assert {each.key: each.value for each in rest} == {b"orders/3/17": None, f"{failed}/1/0".encode(): None}
