"""The query server (`onceflow table serve`) on a real broker."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from onceflow.server import changes, members
from onceflow.server.formats import Format, to_base64url
from onceflow.server.options import Limits
from onceflow.tables import following, share
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.served import numbers, write_rows

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
TOKEN = "a-token-of-the-tests"


def test_lookups(onceflow_broker: str, topic: str, serve: Serve) -> None:
    write_rows(onceflow_broker, topic, numbers(500))
    client = serve(topic)
    found = client.get(f"/tables/{topic}/keys/key-0007")
    assert found.status_code == 200
    document = found.json()
    assert (document["table"], document["key"], document["value"]) == (topic, "key-0007", {"n": 7})
    assert document["position"] == found.headers["Onceflow-Position"]
    assert document["position"].startswith(f"{topic}@")
    assert str(document["lag"]["records"]) == found.headers["Onceflow-Lag-Records"] == "0"
    assert str(document["lag"]["ms"]) == found.headers["Onceflow-Lag-Ms"]
    # With a parameter, the request takes another way through the server.
    again = client.get(f"/tables/{topic}/keys/key-0007", params={"value_encoding": "text"}).json()
    assert (again["key"], again["value"]) == ("key-0007", '{"n": 7}')

    missing = client.get(f"/tables/{topic}/keys/nobody")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"
    assert missing.headers["Onceflow-Position"] == missing.json()["position"]

    many = client.post(f"/tables/{topic}/multi-get", json={"keys": ["key-0003", "no", "key-0001", "key-0003"]}).json()
    assert many["rows"] == [{"key": f"key-000{n}", "value": {"n": n}} for n in (3, 1)], "each once"
    assert client.get(f"/tables/{topic}/count").json()["count"] == 500

    listed = client.get("/tables").json()["tables"]
    assert [table["table"] for table in listed] == [topic]
    assert listed[0]["placement"] == client.get(f"/tables/{topic}").json()["placement"] == "default"
    assert [each["partition"] for each in listed[0]["partitions"]] == [0, 1, 2, 3]
    assert all(each["instances"] and not each["restoring"] for each in listed[0]["partitions"])
    assert client.get("/tables/other").status_code == client.get("/tables/other/count").status_code == 404
    assert client.get("/health").json()["status"] == "ok"
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert "/tables/{table}/range" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


def test_ranges_and_cursors(onceflow_broker: str, topic: str, serve: Serve) -> None:
    rows = numbers(3_000)
    write_rows(
        onceflow_broker, topic, {**rows, "other": "1", "pretty": '{\n  "big": 12345678901234567890123,\n "a": 1.0}'}
    )
    client = serve(topic)

    def get(**params: Any) -> Any:
        found = client.get(f"/tables/{topic}/range", params=params)
        assert found.status_code == 200, found.text
        return found.json()

    def lines(**params: Any) -> tuple[list[Any], Any]:
        headers = {"Accept": "application/x-ndjson"}
        with client.stream("GET", f"/tables/{topic}/range", params=params, headers=headers) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            *found, last = [json.loads(line) for line in response.iter_lines()]
        return [row["key"] for row in found], last

    first = get(start="key-0010", end="key-0020", limit=4)
    assert [row["key"] for row in first["rows"]] == [f"key-{n:04d}" for n in range(10, 14)]
    rest = get(start="key-0010", end="key-0020", cursor=first["cursor"])
    assert [row["value"]["n"] for row in rest["rows"]] == list(range(14, 20))
    assert rest["cursor"] is None
    last = get(prefix="key-", reverse=True, limit=3)
    assert [row["key"] for row in last["rows"]] == ["key-2999", "key-2998", "key-2997"]
    before = get(prefix="key-", reverse=True, limit=2, cursor=last["cursor"])
    assert [row["key"] for row in before["rows"]] == ["key-2996", "key-2995"]
    assert get(start="key-0020", end="key-0010")["rows"] == []
    assert len(get()["rows"]) == 100
    assert get(limit=2, prefix="p")["cursor"] is None

    keys, ending = lines()
    assert keys == sorted([*rows, "other", "pretty"])
    assert (ending["cursor"], ending["count"]) == (None, 3_002)
    assert ending["position"].startswith(topic)
    assert lines(reverse=True)[0] == keys[::-1]
    some, ending = lines(limit=1_700)
    more, _ = lines(cursor=ending["cursor"])
    assert some + more == keys
    # Digits stay as they were written, and line breaks do not break lines.
    text = client.get(f"/tables/{topic}/range?prefix=pretty", headers={"Accept": "application/x-ndjson"}).text
    assert "12345678901234567890123" in text
    assert "1.0" in text.splitlines()[0]
    assert client.get(f"/tables/{topic}/range?limit=100000").status_code == 400
    assert client.get(f"/tables/{topic}/range?cursor=%C3%BC").status_code == 400


def test_misspelled_parameters(onceflow_broker: str, topic: str, serve: Serve) -> None:
    """They are refused: what was meant would otherwise not be demanded."""
    write_rows(onceflow_broker, topic, numbers(3))
    client = serve(topic)
    for path, name, meant in (
        ("keys/key-0001", "min_positon", "min_position"),
        ("keys/key-0001", "max_stalenes", "max_staleness"),
        ("range", "prefx", "prefix"),
        ("count", "min_pos", "min_position"),
        ("changes", "sinc", "since"),
    ):
        found = client.get(f"/tables/{topic}/{path}?{name}=1")
        assert (found.status_code, found.json()["detail"]) == (400, f"This request has no parameter {name!r}")
        assert found.json()["next_step"] == f"did you mean {meant}?"
    unknown = client.post(f"/tables/{topic}/multi-get?x=1", json={"keys": ["a"]}).json()
    assert unknown["next_step"] == "it has key_encoding, max_staleness, min_position, value_encoding, wait"


def test_keys_and_values_of_all_kinds(onceflow_broker: str, topic: str, make_topic: Any, serve: Serve) -> None:
    binary = bytes(range(256))
    longest = b"k" * 700
    hostile = [
        b"../../etc/passwd",
        b"",
        b".",
        b"a/b//c",
        b"?x=1#y",
        b"%2e",
        b" \t\r\n\0",
        "\u00fc\u4e2d".encode(),
        longest,
    ]
    write_rows(
        onceflow_broker,
        topic,
        {**dict.fromkeys(hostile, b"1"), binary: b"2", b"bad": b"\xffno json", b"l" * 5000: b"3"},
    )
    longs = make_topic("longs", 2, cleanup_policy="compact")
    write_rows(
        onceflow_broker, longs, {n.to_bytes(8, "big", signed=True): f"text {n}".encode() for n in (-1, 0, 1 << 62)}
    )
    client = serve({topic: Format(), longs: Format.of("long", "text")})
    for key in hostile:
        quoted = "".join(f"%{byte:02x}" for byte in key)
        assert client.get(f"/tables/{topic}/keys/{quoted}").json()["value"] == 1, key
        params = {"key_encoding": "base64url"}
        found = client.get(f"/tables/{topic}/keys/{to_base64url(key)}", params=params).json()
        assert (found["key"], found["value"]) == (to_base64url(key), 1)
    in_base64 = client.get(f"/tables/{topic}/keys/{to_base64url(binary)}", params={"key_encoding": "base64url"})
    assert in_base64.json()["value"] == 2
    assert client.get(f"/tables/{topic}/keys/%ff").status_code == 400
    assert client.get(f"/tables/{topic}/keys/{'l' * 5000}").json()["value"] == 3
    assert client.get(f"/tables/{topic}/keys/{'l' * 4999}").status_code == 404
    assert client.get(f"/tables/{topic}").json()["ignored"] == 0

    unreadable = client.get(f"/tables/{topic}/keys/bad")
    assert unreadable.status_code == 422
    assert "not json" in unreadable.json()["detail"]
    raw = client.get(f"/tables/{topic}/keys/bad", params={"value_encoding": "base64"}).json()["value"]
    assert base64.b64decode(raw) == b"\xffno json"
    rows = {row["key"]: row for row in client.get(f"/tables/{topic}/range").json()["rows"]}
    assert len(rows) == len(hostile) + 3
    assert "not json" in rows["bad"]["error"]
    assert rows[None]["key_base64"] == to_base64url(binary)

    assert client.get(f"/tables/{longs}/keys/-1").json()["value"] == "text -1"
    many = client.post(f"/tables/{longs}/multi-get", json={"keys": [0, str(1 << 62), 5]}).json()["rows"]
    assert [row["key"] for row in many] == [0, 1 << 62]
    for wrong in ("x", "1" * 30, "1.5"):
        assert client.get(f"/tables/{longs}/keys/{wrong}").status_code == 400
    for body in ("", "[]", '{"keys": 3}', '{"keys": [[1]]}', '{"keys": ["\\ud800"]}', '{"keys": [true]}'):
        assert client.post(f"/tables/{longs}/multi-get", content=body).status_code == 400
    assert client.post(f"/tables/{topic}/multi-get", json={"keys": ["a"] * 1_001}).status_code == 413


def test_read_your_writes_and_staleness(onceflow_broker: str, topic: str, serve: Serve) -> None:
    client = serve(topic)
    for n in range(5):
        position = write_rows(onceflow_broker, topic, {f"key-{key}": str(n) for key in range(8)})
        for key in range(8):
            found = client.get(f"/tables/{topic}/keys/key-{key}", params={"min_position": position})
            assert found.json()["value"] == n
        counted = client.get(f"/tables/{topic}/count", params={"min_position": position, "max_staleness": "1 minute"})
        assert counted.json()["count"] == 8
    behind = client.get(f"/tables/{topic}/count", params={"min_position": f"{topic}:9999", "wait": "0.05"})
    assert behind.status_code == 503
    assert behind.headers["Retry-After"] == "1"
    assert "min_position" in behind.json()["detail"]
    assert behind.json()["position"]
    stale = client.get(f"/tables/{topic}/keys/key-1", params={"max_staleness": "0", "wait": "0"})
    assert stale.status_code in (200, 503)
    begin = found.headers["Onceflow-Position"]
    assert client.get(f"/tables/{topic}/count", params={"min_position": begin}).status_code == 200
    earlier = f"{topic}@{uuid.uuid4()}:{begin.partition(':')[2]}"  # of a topic that was deleted
    for path, params in (("keys/key-1", {"min_position": earlier}), ("changes", {"since": earlier})):
        refused = client.get(f"/tables/{topic}/{path}", params=params)
        assert refused.status_code == 400
        assert "deleted and created again" in refused.json()["detail"]
        assert refused.json()["next_step"]
    for params in (
        {"min_position": "1 2"},
        {"min_position": "other:1"},
        {"max_staleness": "soon"},
        {"wait": "-1"},
        {"wait": "1e999"},
        {"value_encoding": "xml"},
    ):
        assert client.get(f"/tables/{topic}/keys/key-1", params=params).status_code == 400, params


def test_changes(onceflow_broker: str, topic: str, serve: Serve) -> None:
    write_rows(onceflow_broker, topic, {"a": "1", "b": "2"})
    client = serve(topic, limits=Limits(streams=1))

    def read(count: int, **params: Any) -> list[tuple[str, str, Any]]:
        found: list[tuple[str, str, Any]] = []
        with client.stream("GET", f"/tables/{topic}/changes", params=params) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            event: dict[str, str] = {}
            for line in response.iter_lines():
                if line:
                    name, _, rest = line.partition(": ")
                    event[name] = rest
                    continue
                found.append((event["event"], event["id"], json.loads(event["data"])))
                if len(found) == 1:
                    assert client.get(f"/tables/{topic}/changes").status_code == 503  # one stream is the limit
                    write_rows(onceflow_broker, topic, {"a": None, "c": "3"})
                if len(found) == count:
                    return found
        return found

    first, *changes = read(3)
    assert first[0] == "position"
    assert {(event, data["key"], data["value"], data.get("deleted")) for event, _, data in changes} == {
        ("change", "a", None, True),
        ("change", "c", 3, None),
    }
    wait_until(lambda: client.get(f"/tables/{topic}/changes", params={"since": "x"}).status_code == 400, 30, "the end")
    # From an earlier position, and on from where another stream has ended.
    _, *again = read(5, since=first[1])
    assert [data["key"] for _, _, data in again[:2]] in (["a", "c"], ["c", "a"])
    assert set(again[1][2]) - {"deleted"} == {"key", "value", "partition", "offset", "timestamp_ms"}
    wait_until(lambda: client.get(f"/tables/{topic}/changes", params={"since": "x"}).status_code == 400, 30, "the end")
    _, *rest = read(3, since=again[0][1], prefix="c")
    assert {data["key"] for _, _, data in rest} == {"c"}


def test_another_partitioner(onceflow_broker: str, make_topic: Callable[..., str], serve: Serve) -> None:
    """Python producers with default settings place keys by CRC32."""
    topic = make_topic("crc", 6, cleanup_policy="compact")
    write_rows(onceflow_broker, topic, numbers(100), "consistent_random")
    client = serve(topic)
    assert client.get(f"/tables/{topic}").json()["placement"] == "other"
    for n in range(100):
        assert client.get(f"/tables/{topic}/keys/key-{n:04d}").json()["value"] == {"n": n}
    many = client.post(f"/tables/{topic}/multi-get", json={"keys": list(numbers(120))}).json()
    assert len(many["rows"]) == 100


def changes_read(client: httpx.Client, topic: str, **params: str) -> Iterator[tuple[str, str, Any]]:
    """Kind, id and document of each event of a stream."""
    event: dict[str, str] = {}
    with client.stream("GET", f"/tables/{topic}/changes", params=params) as response:
        for line in response.iter_lines():
            if line:
                name, _, rest = line.partition(": ")
                event[name] = rest
            else:
                yield event["event"], event["id"], json.loads(event["data"])


@pytest.mark.long
def test_a_topic_that_grows(onceflow_broker: str, topic: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_METADATA_S", 0.5)
    monkeypatch.setattr(changes, "_METADATA_S", 0.5)
    write_rows(onceflow_broker, topic, {**numbers(40), **{f"old-{n}": "1" for n in range(20)}})
    client = serve(topic)
    assert client.get(f"/tables/{topic}").json()["placement"] == "default"
    stream = changes_read(client, topic)
    begin = next(stream)
    assert begin[0] == "position"
    # That of one key shows which partitions it says nothing about.
    assert client.get(f"/tables/{topic}/keys/old-3").json()["position"].count(".") == 3
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    admin.create_partitions([NewPartitions(topic, 7)])[topic].result(30)
    rows = {f"key-{n:04d}": '"new"' for n in range(40)}
    position = write_rows(onceflow_broker, topic, rows)
    # At once: a partition that the server has not heard of is waited for.
    for n in range(40):
        params = {"min_position": position, "wait": "20s"}
        assert client.get(f"/tables/{topic}/keys/key-{n:04d}", params=params).json()["value"] == "new"
    wait_until(lambda: len(client.get(f"/tables/{topic}").json()["partitions"]) == 7, 30, "all partitions")
    assert client.get(f"/tables/{topic}").json()["placement"] == "other"
    wait_until(lambda: client.get("/ready").status_code == 200, 30, "it is ready")
    old = client.get(f"/tables/{topic}/keys/old-3", params={"min_position": begin[1]}).json()
    assert old["value"] == 1
    # No change is missed, neither by the stream that was open nor by one that continues at a position from before.
    for events in (stream, changes_read(client, topic, since=begin[1])):
        seen = list(islice((document for kind, _, document in events if kind == "change"), len(rows)))
        assert sorted(document["key"] for document in seen) == sorted(rows)
        assert {document["partition"] for document in seen} > {4, 5, 6}
        events.close()
    # It has been some time, and there is no such partition.
    refused = client.get(f"/tables/{topic}/keys/old-3", params={"min_position": f"{topic}:.......1", "wait": "0.1s"})
    assert refused.status_code == 503
    assert "has 7 partitions as far as is known here, and min_position names partition 7" in refused.json()["detail"]


@pytest.mark.long
def test_a_topic_that_is_created_again(
    onceflow_broker: str, topic: str, make_topic: Callable[..., str], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table is not answered any more, and what helps is said; other tables are answered."""
    monkeypatch.setattr(following, "_METADATA_S", 0.2)
    other = make_topic("other", 1, cleanup_policy="compact")
    for name in (topic, other):
        write_rows(onceflow_broker, name, {"a": "1"})
    client = serve({topic: Format(), other: Format()})
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    admin.delete_topics([topic])[topic].result(30)

    def gone() -> bool:
        return client.get(f"/tables/{topic}/keys/a").status_code == 503

    wait_until(gone, 60, lambda: client.get(f"/tables/{topic}").text)
    for again in (False, True):
        if again:
            create_topic(onceflow_broker, topic, 4, {"cleanup.policy": "compact"})
        for path in (f"/tables/{topic}/keys/a", f"/tables/{topic}/count", f"/tables/{topic}/range"):
            refused = client.get(path)
            assert refused.status_code == 503
            assert topic in refused.json()["detail"]
            assert refused.json()["next_step"].startswith("restart this instance")
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert "; restart this instance" in ready.json()["waiting_for"][0]
        assert client.get(f"/tables/{other}/keys/a").json()["value"] == 1


def test_an_instance_that_loses_its_group_comes_back(
    onceflow_broker: str, topic: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the Kafka client raises, and whatever opening a partition raises."""
    failures = [RuntimeError("a bug of the client"), OSError("no route")]
    poll, change = members.KafkaConsumer.poll, share.Share.change

    def failing(self: Any, *arguments: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return poll(self, *arguments, **more)

    def refusing(self: Any, wanted: Any) -> None:
        if wanted and not refused:
            refused.append(wanted)
            raise ValueError("a bug of the store")
        change(self, wanted)

    refused: list[Any] = []
    monkeypatch.setattr(members.KafkaConsumer, "poll", failing)
    monkeypatch.setattr(members, "_RETRY_S", 0.2)
    monkeypatch.setattr(share.Share, "change", refusing)
    write_rows(onceflow_broker, topic, numbers(10))
    client = serve(topic, instances=f"group-{topic}")
    assert not failures
    assert refused
    assert client.get(f"/tables/{topic}/keys/key-0003").json()["value"] == {"n": 3}


@pytest.mark.long
def test_a_rebalance_that_takes_longer_than_a_poll(topic: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """kafka-python forgets it if it was begun because of new metadata: the instance would fall out of its group for
    good, and take itself for the only one, as the others do."""
    forgotten: list[Any] = []
    poll = members.KafkaConsumer.poll

    def hasty(self: Any, timeout_ms: int) -> Any:
        coordinator = self._coordinator
        for _ in range(0 if forgotten or not coordinator.stable() else 500):
            if not coordinator.rejoining:
                coordinator._assignment_snapshot = {"another": {0}}
            poll(self, 1)
            if coordinator.rejoining and not coordinator.need_rejoin():
                forgotten.append(coordinator)
                break
        return poll(self, timeout_ms)

    monkeypatch.setattr(members.KafkaConsumer, "poll", hasty)
    client = serve(topic, instances=f"group-{topic}")
    wait_until(lambda: forgotten and forgotten[0].stable() and not forgotten[0].rejoining, 30, "it is a member again")
    assert client.get("/ready").status_code == 200
