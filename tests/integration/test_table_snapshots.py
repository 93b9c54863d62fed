"""Views of tables whose topic holds snapshots of whole partitions (``snapshot_per_partition``), on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceflow import Change, Table
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.state.format import rows
from onceflow.state.joins.copies import open_copy
from onceflow.state.joins.spec import JoinSpec
from onceflow.state.local.format import SNAPSHOT_KEY, snapshot
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.tables.opening import TABLES_FOLDER
from onceflow.testing import independent

pytestmark = pytest.mark.integration


class Snapshots:
    """A topic of one partition, as a flow with ``snapshot_per_partition`` writes it."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.bootstrap, self.topic = bootstrap, topic

    def write(self, content: dict[str, str]) -> bytes:
        pairs = [(rows.value_key(key.encode()), rows.pack(value.encode())) for key, value in content.items()]
        raw = snapshot([*pairs, (rows.map_key(b"a", b"m", b"e"), rows.pack(b"1"))])
        independent.fill(self.bootstrap, self.topic, [(SNAPSHOT_KEY, raw)])
        return raw


@pytest.fixture
def written(onceflow_broker: str, make_topic: Callable[..., str]) -> Snapshots:
    return Snapshots(onceflow_broker, make_topic("snapshots", 1, cleanup_policy="compact"))


def content(store: Store) -> dict[bytes, bytes]:
    return {key[1:]: row[1:] for key, row in store.scan(rows.VALUE, rows.after(rows.VALUE))}


def spoil(folder: Path, raw: bytes) -> None:
    """Make a copy into what a version that did not expect snapshots has left: a row with the snapshot as its value."""
    store = LmdbStore.open(folder)
    old = [(key, None) for key, _ in store.scan(b"")]
    assert store.write([*old, (rows.value_key(SNAPSHOT_KEY), rows.pack(raw))])
    store.close()


def test_a_table_that_is_opened_while_its_topic_is_empty(written: Snapshots, tmp_path: Path) -> None:
    changes: list[Change] = []
    given: Any = {"bootstrap_servers": written.bootstrap, "state_dir": tmp_path}
    with Table(written.topic, **given) as table:
        table.on_change(changes.append)
        written.write({"a": "1", "b": "2"})
        table.wait_until_current()
        assert dict(table.items()) == {b"a": b"1", b"b": b"2"}
        assert list(table.map_entries("m")) == [(b"a", b"e", b"1")]
        raw = written.write({"b": "3", "c": "4"})
        table.wait_until_current()
        assert (dict(table.items()), table.count()) == ({b"b": b"3", b"c": b"4"}, 2)
    found = sorted((change.offset, change.key, change.before, change.value) for change in changes)
    assert found == [
        (0, b"a", None, b"1"),
        (0, b"b", None, b"2"),
        (1, b"a", b"1", None),
        (1, b"b", b"2", b"3"),
        (1, b"c", None, b"4"),
    ]
    folder = tmp_path / TABLES_FOLDER / written.topic / "0" / "0"
    for again in (lambda: None, lambda: spoil(folder, raw), lambda: written.write({"d": "5"})):
        expected = {b"d": b"5"} if again() else {b"b": b"3", b"c": b"4"}
        with Table(written.topic, **given) as table:
            assert dict(table.items()) == expected


def test_a_joined_copy_that_is_opened_while_the_topic_is_empty(written: Snapshots, tmp_path: Path) -> None:
    cluster = Cluster(ClientSettings(written.bootstrap))
    source = CommittedReader(cluster)
    info = cluster.topics([written.topic], Deadline(30, "test"))[written.topic]
    given = ("t", written.topic, info.topic_id, 1, None, None, False, LmdbStore, "flow", "run", tmp_path)
    spec = JoinSpec(*given, tombstone_ms=86_400_000)

    def seen() -> dict[bytes, bytes]:
        store = open_copy(spec, 0, source.end(written.topic, 0), source)
        found = content(store)
        store.close()
        return found

    try:
        assert seen() == {}
        written.write({"a": "1", "b": "2"})
        assert seen() == {b"a": b"1", b"b": b"2"}
        raw = written.write({"b": "3"})
        assert seen() == {b"b": b"3"}
        spoil(spec.folder(0), raw)
        assert seen() == {b"b": b"3"}
    finally:
        cluster.close()


def test_a_server_that_is_started_while_the_topic_is_empty(
    written: Snapshots, serve: Callable[..., httpx.Client]
) -> None:
    topic = written.topic
    client = serve(topic)
    with client.stream("GET", f"/tables/{topic}/changes") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: position"
        written.write({"a": "1", "b": "2"})
        assert next(line for line in lines if line.startswith("event:")) == "event: problem"
        told = json.loads(next(line for line in lines if line.startswith("data:")).removeprefix("data:"))
    params = {"min_position": f"{topic}:1"}
    found = client.get(f"/tables/{topic}/range", params=params).json()["rows"]
    assert found == [{"key": "a", "value": 1}, {"key": "b", "value": 2}]
    refused = client.get(f"/tables/{topic}/changes")
    assert refused.status_code == 400
    assert refused.json()["detail"] == told["detail"]
    assert "snapshot" in told["detail"]
