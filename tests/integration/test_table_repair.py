"""How a table ends, and what it answers while its copy is replaced, on a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock, Timeout

from onceflow import Change, DeadlineExceededError, EnvironmentUnusableError, OnceflowError, OptionError, Table
from onceflow.client.column_chunks import ColumnChunk
from onceflow.client.committed import CommittedReader
from onceflow.state.local.format import COMMIT_RECORD
from onceflow.state.stores.base import StoreCorruptError
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.tables import following
from onceflow.tables.opening import TABLES_FOLDER
from onceflow.tables.share import Share
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("mended", 1, cleanup_policy="compact")


class Gate:
    """Halts who passes it, from `shut` to `open`; or only the first one."""

    def __init__(self, *, first: bool = False) -> None:
        self._first = first
        self._open = threading.Event()
        self.waiting = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()
        self.waiting.clear()

    def open(self) -> None:
        self._open.set()

    def passes(self) -> None:
        if not self._open.is_set() and not (self._first and self.waiting.is_set()):
            self.waiting.set()
            assert self._open.wait(60)


DISK = Gate(first=True)


class SlowDisk(LmdbStore):
    def write(self, *given: Any, **named: Any) -> bool:
        DISK.passes()
        return super().write(*given, **named)


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Halts restores before they read."""
    gate = Gate()

    class Halting(CommittedReader):
        def read_columns(self, *place: Any, headers: bool = False) -> Iterator[ColumnChunk]:
            gate.passes()
            return super().read_columns(*place, headers=headers)

    monkeypatch.setattr(following, "CommittedReader", Halting)
    yield gate
    gate.open()


def is_free(folder: Path) -> bool:
    try:
        FileLock(f"{folder}.lock").acquire(timeout=0).lock.release()
    except Timeout:
        return False
    return True


def damage(folder: Path) -> None:
    """Make a copy that is in use unusable: the next write finds that out."""
    store = LmdbStore.open(folder)
    store.write((), {COMMIT_RECORD: b"?"})
    store.close()


def test_a_copy_is_kept_as_long_as_its_thread_may_write(
    onceflow_broker: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "_STOP_S", 0.2)
    given: Any = {"bootstrap_servers": onceflow_broker, "state_dir": tmp_path}
    folder = tmp_path / TABLES_FOLDER / topic
    try:
        with Table(topic, store=SlowDisk, **given) as table:
            DISK.shut()
            independent.fill(onceflow_broker, topic, [(b"k", b"1")])
            assert DISK.waiting.wait(30)
        assert "the local copy stays locked" in caplog.text
        assert not is_free(folder / "0")
        with table.start() as again:  # of the same table, in another folder
            DISK.open()
            wait_until(lambda: is_free(folder / "0"), 30, "the thread has ended")
            assert not is_free(folder / "1")
            assert again.get(b"k") == b"1"
    finally:
        DISK.open()
    with Table(topic, **given) as table:
        assert table.get(b"k") == b"1"
        wait_until(lambda: is_free(folder / "1"), 30, "the other thread has ended")


def test_a_table_is_closed_by_a_callback(onceflow_broker: str, topic: str, tmp_path: Path) -> None:
    given: Any = {"bootstrap_servers": onceflow_broker, "state_dir": tmp_path}
    changes: list[Change] = []
    table = Table(topic, **given).start()

    def close(change: Change) -> None:
        changes.append(change)
        table.close()

    table.on_change(close)
    independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"1") for n in range(3)])
    wait_until(lambda: is_free(tmp_path / TABLES_FOLDER / topic / "0"), 30, "the table is closed")
    assert len(changes) == 1
    with pytest.raises(OptionError, match="is not open"):
        table.get(b"k0")
    with table.start():
        assert table.count() == 3


@pytest.mark.long
def test_a_thread_that_is_slow_to_end_keeps_its_partitions(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions that come and go: nothing is opened twice, and nothing is left without a thread."""
    topic = make_topic("shared", 2, cleanup_policy="compact")
    options: Any = {"options": None, "store": SlowDisk, "state_dir": tmp_path, "connect_timeout": "15 seconds"}
    share = Share(topic, bootstrap_servers=onceflow_broker, **options)
    share.open()

    def is_read(ends: dict[tuple[str, int], int], wanted: list[int]) -> bool:
        found = {at: share.progress(at) for at in wanted}
        return all(each is not None and each.position == ends[topic, at] for at, each in found.items())

    try:
        share.change([0])
        share.change([0, 1])
        DISK.shut()
        independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"1") for n in range(20)])
        assert DISK.waiting.wait(30)
        with monkeypatch.context() as patch:
            patch.setattr("onceflow.tables.share._HALT_S", 0.2)
            with pytest.raises(DeadlineExceededError, match="did not end"):
                share.change([1])
        DISK.open()
        for wanted in ([1], [0, 1]):
            share.change(wanted)
            assert sorted(share.held) == wanted
            independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"2") for n in range(20)])
            ends = independent.end_offsets(onceflow_broker, topic)
            wait_until(partial(is_read, ends, wanted), 30, f"partitions {wanted} are followed")
    finally:
        DISK.open()
        share.close()


def test_lookups_wait_while_a_copy_is_replaced(
    onceflow_broker: str, topic: str, tmp_path: Path, restores: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    independent.fill(onceflow_broker, topic, [(b"k", b"1")])
    independent.fill(onceflow_broker, topic, [(b"many-%d" % n, b"") for n in range(2_000)])
    given: Any = {"bootstrap_servers": onceflow_broker, "state_dir": tmp_path}
    with Table(topic, **given) as table, Table(topic, **given, wait=False) as patient, ThreadPoolExecutor() as pool:
        patient.wait_until_current()
        changes: list[Change] = []
        table.on_change(changes.append)
        independent.fill(onceflow_broker, topic, [(b"l", b"2")])
        table.wait_until_current()
        scan = table.items()
        assert next(scan) == (b"k", b"1")
        restores.shut()
        for slot in "01":
            damage(tmp_path / TABLES_FOLDER / topic / slot / "0")
        independent.fill(onceflow_broker, topic, [(b"m", b"3")])
        assert restores.waiting.wait(30)
        wait_until(lambda: patient.get(b"k") is None, 30, "the copy is replaced")  # wait=False: what is here
        assert patient.lag.ms is None
        wait_until(lambda: table.restore.running, 30, "the copy of the other table is replaced, too")
        with monkeypatch.context() as patch:
            patch.setattr(following, "_REPAIR_S", 0.1)
            with pytest.raises(DeadlineExceededError, match="is being read again") as raised:
                table.get(b"k")
            assert raised.value.next_step
        waiting = [pool.submit(table.get, b"l"), pool.submit(table.count), pool.submit(table.multi_get, [b"k"])]
        with pytest.raises(OnceflowError, match="was replaced while it was read"):
            list(scan)
        restores.open()
        assert waiting[0].result(30) == b"2"
        assert waiting[1].result(30) >= 2_002
        assert waiting[2].result(30) == {b"k": b"1"}
        table.wait_until_current()
        assert dict(table.range(end=b"many")) == {b"k": b"1", b"l": b"2", b"m": b"3"}
        assert [(change.key, change.before) for change in changes] == [(b"l", None), (b"m", None)]


def test_a_server_does_not_read_a_copy_that_is_replaced(
    onceflow_broker: str, topic: str, tmp_path: Path, restores: Gate, serve: Callable[..., httpx.Client]
) -> None:
    """It would say 404 of rows that it had."""
    independent.fill(onceflow_broker, topic, [(b"k", b"1"), (b"l", b"2")])
    client = serve(topic)
    try:
        seen = client.get(f"/tables/{topic}/keys/k").headers["Onceflow-Position"]
        restores.shut()
        damage(tmp_path / TABLES_FOLDER / topic / "0" / "0")
        independent.fill(onceflow_broker, topic, [(b"m", b"3")])
        assert restores.waiting.wait(30)
        wait_until(lambda: "was damaged" in client.get("/ready").text, 30, "the restore is told")
        demands: list[dict[str, str]] = [{}, {"min_position": seen}, {"max_staleness": "1 hour"}]
        for path in ("keys/k", "count", "range"):
            for params in demands:
                found = client.get(f"/tables/{topic}/{path}", params={**params, "wait": "0"})
                assert found.status_code == 503
                assert "is read from Kafka again" in found.json()["detail"]
        (partition,) = client.get(f"/tables/{topic}").json()["partitions"]
        assert partition["restoring"]
        assert partition["lag"]["records"] >= 2
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.get, f"/tables/{topic}/keys/k", params={"wait": "30s"})
            restores.open()
            assert waiting.result(30).json()["value"] == 1
    finally:
        restores.open()


class Rotten(LmdbStore):
    """It is damaged by every write of rows."""

    def write(self, changes: Any, *given: Any, **named: Any) -> bool:
        if changes:
            self.put_new()
        return super().write(changes, *given, **named)

    def put_new(self, *given: Any) -> bool:
        raise StoreCorruptError("the local store is damaged: for this test")


@pytest.mark.long
def test_a_copy_that_cannot_be_repaired(
    onceflow_broker: str, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    independent.fill(onceflow_broker, topic, [(b"k", b"1")])
    given: Any = {"bootstrap_servers": onceflow_broker, "state_dir": tmp_path, "store": Rotten}
    with pytest.raises(EnvironmentUnusableError, match="is damaged again each time"):
        Table(topic, **given).start()
    assert len([each for each in caplog.messages if "is removed" in each]) == 1
