"""The local copy of a partition: whatever is found on disk, what is opened holds exactly what is committed.

Run as a program, this file plays the process that opens a damaged copy and may die of it, and the one that is
killed in the middle of a restore.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onceflow.errors import DataLossError, DeadlineExceededError, EnvironmentUnusableError, FencedError, OptionError
from onceflow.state.format import rows
from onceflow.state.local import catch_up, opening, spool
from onceflow.state.local.format import (
    COMMIT_RECORD,
    PENDING,
    Chunk,
    CommitId,
    CommitRecord,
    Goal,
    default_state_dir,
    partition_folder,
)
from onceflow.state.local.opening import Opened, open_partition, set_pending, settle
from onceflow.state.stores import lmdb_environment
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_environment import forget
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.tables.table import Table

sys.path.insert(0, str(Path(__file__).parent))
try:
    from partition_flow import HOUR, NOW, Changes, Flow, Topics
finally:
    sys.path.pop(0)


@pytest.fixture(params=[LmdbStore, MemoryStore, RocksdbStore], ids=["lmdb", "memory", "rocksdb"])
def opener(request: pytest.FixtureRequest) -> type[Store]:
    opener: type[Store] = request.param
    return opener


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return partition_folder(tmp_path, "flow", "table", 3)


# ---- what is found and what is done ------------------------------------------------------------------


def test_batch_after_batch(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    flow.check(flow.open(folder, opener))
    for _ in range(12):
        flow.run(folder, opener)
        opened = flow.open(folder, opener)
        assert (opened.how, opened.records) == ("settled", 0)
        flow.check(opened)
        assert flow.open(folder, opener).how == "in sync"


def test_a_missing_copy_is_restored(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    for _ in range(5):
        flow.commit(flow.changes())
    seen: list[int] = []
    opened = open_partition(
        folder,
        opener,
        flow.goal,
        flow.topics,
        verify=True,
        now_ms=NOW,
        progress=seen.append,
    )
    read = len(flow.topics.records["table"]) + len(flow.topics.records.get("table-internal", {}))
    assert (opened.how, opened.records, opened.why) == ("restored", read, "")
    assert seen == sorted(seen)
    assert seen[-1] == read
    flow.check(opened)


HOLDS_AND_STOPS = """
import os, signal, sys
from pathlib import Path
from onceflow.state.stores.lmdb_store import LmdbStore

store = LmdbStore.open(Path(sys.argv[1]))
with store.bulk() as commit:
    store.write([(b"vb", b"2")])
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    commit()
store.write([(b"vc", b"3")])
store.close()
"""


@pytest.mark.slow
def test_a_copy_whose_writer_was_stopped_is_restored_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that was stopped (SIGSTOP) would keep the one that takes over waiting. What it writes when it goes on
    is in files that nobody opens any more."""
    monkeypatch.setattr(lmdb_environment, "_STOPPED_S", 0.2)
    monkeypatch.setattr(opening, "_HELD_S", 0.5)
    flow = Flow()
    for _ in range(3):
        flow.run(folder, LmdbStore)
    forget(folder)
    command = [sys.executable, "-c", HOLDS_AND_STOPS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            known = flow.goal
            flow.goal = replace(known, changelog=False)
            with pytest.raises(DeadlineExceededError, match=f"process {process.pid} was stopped while it was writing"):
                flow.open(folder, LmdbStore)
            flow.goal = known
            opened = flow.open(folder, LmdbStore)
            assert (opened.how, opened.why) == (
                "restored",
                f"process {process.pid} was stopped while it was writing to it",
            )
            flow.check(opened)
            flow.run(folder, LmdbStore)
            os.kill(process.pid, signal.SIGCONT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    flow.check(flow.open(folder, LmdbStore))


def test_without_transactions_the_topic_is_read_to_its_end(opener: type[Store], folder: Path) -> None:
    """A batch has no progress, but compaction has removed the rows that its rows have replaced."""
    flow = Flow()
    flow.run(folder, opener)
    flow.run(folder, opener)
    known = flow.goal = replace(flow.goal, open_ended=True)
    before = dict(flow.rows)
    flow.commit([(key, row) for key, row in flow.rows.items()])  # the driver dies before it has written progress
    flow.topics.compact("table")
    flow.topics.records.setdefault("table-internal", {})
    flow.topics.compact("table-internal")
    flow.goal = known
    assert flow.rows == before
    opened = flow.open(folder, opener)  # what is there is as of the progress, so the batch runs again on that
    assert (opened.how, opened.records) == ("settled", 0)
    flow.check(opened)
    opener.remove(folder)
    opened = flow.open(folder, opener)
    assert opened.how == "restored"
    flow.check(opened)
    assert flow.open(folder, opener).how == "in sync"

    opener.remove(folder)
    flow.goal = replace(known, open_ended=False)
    opened = flow.open(folder, opener)  # a broken build that trusts progress loses these rows
    assert len(list(opened.store.scan(b""))) < len(before)
    opened.store.close()


def test_a_compacted_topic_restores_to_the_same_rows(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    for _ in range(8):
        flow.commit(flow.changes())
    flow.topics.compact("table", tombstones=True)
    flow.topics.compact("table-internal")
    flow.check(flow.open(folder, opener))


def test_an_aborted_batch_is_dropped(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    flow.run(folder, opener)
    opened = flow.open(folder, opener)
    goal = flow.goal
    for commit in (CommitId(99, 9, 1), CommitId(flow.batch + 1, 9, 1)):
        # The second is the batch that is committed below, but of another epoch.
        set_pending(opened.store, goal, commit, flow.changes(), goal.table_end + 5, goal.internal_end + 3)
    opened.store.close()
    assert flow.open(folder, opener).how == "in sync"
    flow.commit(flow.changes())
    flow.goal = replace(flow.goal, last=CommitId(flow.batch, 9, 2))
    opened = flow.open(folder, opener)
    assert opened.how == "caught up"
    assert opened.store.blob(PENDING) is None
    flow.check(opened)


@pytest.mark.parametrize("torn", ["base", "ends", "last"])
def test_pending_is_applied_only_between_its_own_offsets(opener: type[Store], folder: Path, torn: str) -> None:
    flow = Flow()
    flow.run(folder, opener)
    opened = flow.open(folder, opener)
    before, changes = flow.goal, flow.changes()
    goal = flow.commit(changes)
    assert goal.last is not None
    base = replace(before, table_end=before.table_end - 1) if torn == "base" else before
    other = CommitId(goal.last.batch, goal.last.producer_id + 1, goal.last.producer_epoch)
    commit = other if torn == "last" else goal.last
    wrong: Changes = [(b"vwrong", rows.pack(b""))]
    set_pending(opened.store, base, commit, wrong, goal.table_end + (torn == "ends"), goal.internal_end)
    opened.store.close()
    opened = flow.open(folder, opener)
    assert opened.how == "caught up"
    flow.check(opened)


@pytest.mark.parametrize(
    "late, wins",
    [(CommitId(1, 9, 1), False), (CommitId(1, 9, 2), True), (CommitId(1, 9, 3), True), (CommitId(1, 8, 7), True)],
    ids=["a zombie", "the same attempt", "a later attempt", "another producer id"],
)
def test_a_zombie_leaves_the_only_copy_of_later_changes_alone(
    opener: type[Store], folder: Path, late: CommitId, wins: bool
) -> None:
    """Without a changelog. The zombie has opened the copy first, and runs on after a later attempt has ended."""
    none = Goal("flow", "table", 3, "id", "", 0, 0, changelog=False)
    topics = Topics()

    def at(goal: Goal) -> Opened:
        return open_partition(folder, opener, goal, topics, verify=False, now_ms=NOW)

    opened, attempt = at(none), CommitId(1, 9, 2)
    for commit, value in ((attempt, b"new"), (late, b"old")):
        set_pending(opened.store, none, commit, [(b"vkey", rows.pack(value))], 1, 0)
    opened.store.close()
    opened = at(replace(none, table_end=1, last=late if wins else attempt))
    assert opened.how == "settled"
    assert opened.store.get(b"vkey") == rows.pack(b"old" if wins else b"new")
    opened.store.close()


def test_settling_at_the_end_of_a_flow(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    assert not settle(folder, opener, CommitId(1, 9, 1))
    assert not opener.exists(folder)
    flow.run(folder, opener, settled=True)
    assert flow.goal.last is not None
    assert not settle(folder, opener, flow.goal.last)
    opened = flow.open(folder, opener)
    assert (opened.how, opened.records) == ("in sync", 0)
    flow.check(opened)
    flow.run(folder, opener)
    assert not settle(folder, opener, CommitId(flow.batch, 9, 2))
    assert flow.open(folder, opener).how == "settled"


def test_a_stale_copy_reads_only_what_it_lacks(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    flow.run(folder, opener, settled=True)
    before = dict(flow.topics.ends)
    for _ in range(3):
        flow.commit(flow.changes())
    flow.topics.read_from = []
    opened = flow.open(folder, opener)
    assert opened.how == "caught up"
    assert flow.topics.read_from == [
        ("table", before["table"], flow.goal.table_end),
        ("table-internal", before["table-internal"], flow.goal.internal_end),
    ]
    flow.check(opened)


@pytest.mark.parametrize(
    "changed",
    [
        {"flow": "other"},
        {"table": "other"},
        {"partition": 4},
        {"table_id": "id-new"},
        {"internal_id": "id-new"},
    ],
)
def test_a_copy_of_something_else_is_replaced(
    opener: type[Store], folder: Path, changed: dict[str, str | int], caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Flow(seed=5)
    foreign.goal = replace(foreign.goal, **changed)  # type: ignore[arg-type]
    foreign.topics.ends |= {"other": 0, "other-internal": 0}
    foreign.run(folder, opener)
    flow = Flow()
    for _ in range(3):
        flow.commit(flow.changes())
    with caplog.at_level(logging.WARNING, "onceflow.state"):
        opened = flow.open(folder, opener)
    assert opened.how == "restored"
    assert opened.why
    assert len(caplog.records) == 1
    assert "restored" in caplog.text
    assert opened.why in caplog.text
    flow.check(opened)


@pytest.mark.parametrize("topic", ["table", "internal"])
def test_a_copy_that_is_ahead_of_kafka_is_replaced(opener: type[Store], folder: Path, topic: str) -> None:
    flow = Flow()
    flow.run(folder, opener, settled=True)
    opened = flow.open(folder, opener)
    commit_record = CommitRecord.decode(opened.store.blob(COMMIT_RECORD) or b"")
    assert commit_record is not None
    ahead = replace(commit_record, **{f"{topic}_end": 1000})  # type: ignore[arg-type]
    opened.store.write([(b"vnot there", b"\0")], {COMMIT_RECORD: ahead.encode()})
    opened.store.close()
    opened = flow.open(folder, opener)
    assert (opened.how, opened.why) == ("restored", "it is ahead of what is committed")
    flow.check(opened)


def test_a_driver_that_was_fenced_leaves_the_newer_copy_alone(opener: type[Store], folder: Path) -> None:
    """The copy is ahead of an older driver because a newer one keeps it."""
    flow = Flow()
    behind = flow.run(folder, opener, settled=True)
    flow.run(folder, opener, settled=True)
    with pytest.raises(FencedError, match="newer driver"):
        open_partition(folder, opener, behind, flow.topics, verify=False, now_ms=NOW, still_owner=lambda: False)
    opened = flow.open(folder, opener)
    assert opened.how == "in sync"
    flow.check(opened)


@pytest.mark.parametrize("commit_record", [None, b"", b"{", b"[]", b'{"format": 99}', b'{"format": 1, "flow": "flow"}'])
def test_an_unreadable_commit_record_ends_in_a_restore(
    opener: type[Store], folder: Path, commit_record: bytes | None
) -> None:
    flow = Flow()
    flow.run(folder, opener, settled=True)
    store = opener.open(folder)
    store.write([(b"vnot there", b"\0")], {COMMIT_RECORD: commit_record})
    store.close()
    opened = flow.open(folder, opener)
    assert opened.how == "restored"
    flow.check(opened)


def test_a_deleted_folder_is_restored(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    flow.run(folder, opener, settled=True)
    if opener is MemoryStore:
        opener.remove(folder)
    else:
        shutil.rmtree(folder)
    opened = flow.open(folder, opener)
    assert opened.how == "restored"
    flow.check(opened)


def test_a_copy_older_than_tombstones_is_restored(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    for turn in range(3):
        flow.run(folder, opener, settled=True)
        last = flow.open(folder, opener)
        commit_record = CommitRecord.decode(last.store.blob(COMMIT_RECORD) or b"")
        assert commit_record is not None
        assert commit_record.time_ms == NOW
        last.store.close()
        flow.commit(flow.changes())
        if turn == 0:
            opened = flow.open(folder, opener, now_ms=NOW + 12 * HOUR)
            assert opened.how == "caught up"
        elif turn == 1:
            opened = flow.open(folder, opener, now_ms=NOW + 12 * HOUR + 1)
            assert opened.how == "restored"
        else:
            # Nothing is missing, however old it is: no tombstone is needed.
            flow.open(folder, opener).store.close()
            opened = flow.open(folder, opener, now_ms=NOW + 1000 * HOUR)
            assert opened.how == "in sync"
            commit_record = CommitRecord.decode(opened.store.blob(COMMIT_RECORD) or b"")
            assert commit_record is not None
            assert commit_record.time_ms == NOW + 1000 * HOUR
        flow.check(opened)
        opener.remove(folder)


def test_an_interrupted_restore_counts_its_age_from_its_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_WRITTEN_ROWS", 5)
    flow = Flow()
    for _ in range(4):
        flow.commit(flow.changes())

    class Broken(Topics):
        def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
            for at, part in enumerate(super().read(topic, partition, start, end)):
                if at == 4:
                    raise DataLossError("the broker is gone")
                yield part

    # Of the engines that commit every write.
    for opener in (MemoryStore, RocksdbStore):
        broken = Broken()
        broken.records, broken.ends = flow.topics.records, flow.topics.ends
        with pytest.raises(DataLossError):
            open_partition(folder, opener, flow.goal, broken, verify=False, now_ms=NOW)
        store = opener.open(folder)
        commit_record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
        store.close()
        assert commit_record is not None
        assert 0 < commit_record.table_end < flow.goal.table_end
        assert commit_record.time_ms == NOW
        opened = flow.open(folder, opener, now_ms=NOW + HOUR)
        assert opened.how == "caught up"
        flow.check(opened)


def test_another_attempt_may_move_the_commit_record_meanwhile(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    for _ in range(4):
        flow.commit(flow.changes())

    class Interrupting(Topics):
        def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
            for part in super().read(topic, partition, start, end):
                flow.open(folder, opener).store.close()
                yield part

    topics = Interrupting()
    topics.records, topics.ends = flow.topics.records, flow.topics.ends
    opened = open_partition(folder, opener, flow.goal, topics, verify=False, now_ms=NOW)
    assert opened.how == "in sync"
    flow.check(opened)


def test_two_attempts_that_take_turns_both_get_there(opener: type[Store], folder: Path) -> None:
    """Each commit of the one makes the other read again, more often than it may move without progress."""
    flow = Flow()
    for _ in range(4):
        flow.commit(flow.changes())
    goals = iter([replace(flow.goal, table_end=end, internal_end=0) for end in range(1, 31)])

    class Overtaken(Topics):
        def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
            yield from super().read(topic, partition, start, end)
            goal = next(goals, None)
            if goal is not None:
                open_partition(folder, opener, goal, flow.topics, verify=False, now_ms=NOW).store.close()

    topics = Overtaken()
    topics.records, topics.ends = flow.topics.records, flow.topics.ends
    opened = open_partition(folder, opener, flow.goal, topics, verify=False, now_ms=NOW)
    assert next(goals, None) is None
    flow.check(opened)


def test_nothing_is_locked_while_kafka_is_read(opener: type[Store], folder: Path) -> None:
    """A broker may take a minute to answer, and another attempt is not to wait for it."""
    flow = Flow()
    flow.run(folder, opener, settled=True)
    for _ in range(4):
        flow.commit(flow.changes())
    written = []

    def write() -> None:
        store = opener.open(folder)
        store.write((), {"of another": b"x"})
        store.close()
        written.append(1)

    class Slow(Topics):
        def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
            for part in super().read(topic, partition, start, end):
                thread = threading.Thread(target=write, daemon=True)
                thread.start()
                thread.join(10)
                assert not thread.is_alive()
                yield part

    topics = Slow()
    topics.records, topics.ends = flow.topics.records, flow.topics.ends
    flow.check(open_partition(folder, opener, flow.goal, topics, verify=False, now_ms=NOW))
    assert len(written) > 4


def test_a_long_restore_holds_little_in_memory_and_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_WRITTEN_ROWS", 10)
    monkeypatch.setattr(catch_up, "_COMMITTED_ROWS", 50)
    commits = []
    bulk = LmdbStore.bulk
    monkeypatch.setattr(LmdbStore, "bulk", lambda store: commits.append(1) or bulk(store))
    flow = Flow(keys=1000, chunk_size=5)
    for _ in range(20):
        flow.commit(flow.changes())
    opened = flow.open(folder, LmdbStore)
    flow.check(opened)
    assert 5 < len(commits) < 20
    assert {file.name for file in folder.iterdir()} == {"data.mdb", "lock.mdb", "writer.lock"}


def test_somebody_who_never_stops_moving_the_commit_record_is_an_error(folder: Path) -> None:
    flow = Flow()
    flow.commit(flow.changes())

    class Fighting(MemoryStore):
        def write(self, *args: object, **options: object) -> bool:
            return False

    with pytest.raises(EnvironmentUnusableError, match="keeps changing"):
        flow.open(folder, Fighting)


def test_records_of_others_are_counted_and_ignored(
    opener: type[Store], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow = Flow()
    flow.commit(flow.changes())
    flow.topics.append("table", None, b"no key", [])
    flow.topics.append("table", None, b"no key, either", [])
    for key, row in [
        (b"x" * 600, b"\0"),
        (b"?", b"\0"),
        (b"", b"\0"),
        (None, b"\0"),
        (rows.map_key(b"k", b"m", b"e"), b""),
        (rows.map_key(b"k", b"m", b"e"), b"\1short"),
        (rows.map_key(b"k", b"m", b"e"), b"\x80flags"),
        (rows.timer_key(b"k", b"t"), b"\0e"),
        (rows.timer_key(b"k", b"t"), b"\1" + rows.timer_payload(b"e", 1)),
    ]:
        flow.topics.append("table-internal", key, row, [])
    flow.commit(flow.changes())
    with caplog.at_level(logging.WARNING, "onceflow.state"):
        opened = flow.open(folder, opener)
    assert "11 records ignored" in caplog.text
    flow.check(opened)


# ---- folders -----------------------------------------------------------------------------------------


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert partition_folder(tmp_path, "flow", "table", 3) == tmp_path / "flow" / "table" / "3"
    for name in ("..", ".", "a/b", "../x", "ä"):
        folder = partition_folder(tmp_path, name, "t", 0)
        assert folder.resolve().parents[2] == tmp_path.resolve()
        assert folder.parents[2] == tmp_path
    assert partition_folder(tmp_path, "a/b", "t", 0) != partition_folder(tmp_path, "a%2Fb", "t", 0)
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", "/named")
    assert default_state_dir() == Path("/named")
    monkeypatch.delenv("ONCEFLOW_STATE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / ".local" / "state" / "onceflow"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"onceflow-{os.geteuid()}"
    assert default_state_dir() == mine / "local" / "state" / "onceflow"
    earlier = tmp_path / f"onceflow-state-{os.geteuid()}"
    earlier.mkdir()
    assert default_state_dir() == earlier, "an earlier version has its state there"
    assert earlier.stat().st_mode & 0o777 == 0o700


# ---- a local table -----------------------------------------------------------------------------------


def test_a_local_table_shows_values_of_all_partitions(opener: type[Store], tmp_path: Path) -> None:
    now = [NOW]
    table = Table.of_flow(tmp_path / "flow" / "table", clock_ms=lambda: now[0])
    for partition in (0, 1, 10):
        goal = Goal("flow", "table", partition, "id-t", "id-i", 0, 0)
        folder = partition_folder(tmp_path, "flow", "table", partition)
        opened = open_partition(folder, opener, goal, Topics(), verify=False, now_ms=NOW)
        name = b"%d" % partition
        changes: Changes = [
            (b"va" + name, rows.pack(b"value " + name)),
            (b"vb" + name, rows.pack(b"expired", NOW)),
            (b"vc" + name, rows.pack(b"later", NOW + 1, 7)),
            (rows.map_key(b"a", b"m", b"e"), rows.pack(b"internal")),
        ]
        set_pending(opened.store, goal, CommitId(1, 1, 1), changes, 3, 1)
        opened.store.close()
        assert table.get(b"a" + name) is None  # pending is not committed
        assert settle(folder, opener, CommitId(1, 1, 1))
    assert table.get(b"a10") == b"value 10"
    assert table.get(b"b0") is None
    assert table.get(b"c1") == b"later"
    assert table.get(b"k" * 600) is None
    assert list(table.range()) == [
        *((b"a" + name, b"value " + name) for name in (b"0", b"1", b"10")),
        *((b"c" + name, b"later") for name in (b"0", b"1", b"10")),
    ]
    assert list(table.range(b"a1", b"c1")) == [(b"a1", b"value 1"), (b"a10", b"value 10"), (b"c0", b"later")]
    assert list(table.prefix(b"c", reverse=True)) == [(b"c10", b"later"), (b"c1", b"later"), (b"c0", b"later")]
    now[0] += 1
    assert list(table.prefix(b"c")) == []
    # A copy of a partition of an earlier topic of that name does not count.
    newer = Goal("flow", "table", 0, "id-new", "id-i", 0, 0)
    folder = partition_folder(tmp_path, "flow", "table", 0)
    open_partition(folder, opener, newer, Topics(), verify=False, now_ms=NOW + 1).store.close()
    assert list(table.range()) == []
    for partition in (0, 1, 10):
        opener.remove(partition_folder(tmp_path, "flow", "table", partition))
    if opener is not MemoryStore:  # of that, nothing is left
        assert list(table.range()) == []


@pytest.mark.parametrize(
    "path, what, there",
    [
        ("flow/tabel", "There is no table in {}", "below {state}/flow there is table"),
        ("flov/table", "There is no table in {}", "below {state} there is flow"),
        (
            "nothing/like/it",
            "There is no table in {}",
            "below {state} there is flow, one-0, one-1, one-10, ",
        ),
        ("flow", "{} is not the folder of a table", "below {state}/flow there is table"),
        ("flow/table/3", "{} is not the folder of a table", "there is no folder below {state}/flow/table/3"),
    ],
)
def test_a_local_table_that_is_not_there_is_refused(path: str, what: str, there: str, tmp_path: Path) -> None:
    """Nobody knows whether the key is missing or the path is wrong, where both give None."""
    goal = Goal("flow", "table", 3, "id-t", "id-i", 0, 0)
    folder = partition_folder(tmp_path, "flow", "table", 3)
    open_partition(folder, LmdbStore, goal, Topics(), verify=False, now_ms=NOW).store.close()
    for number in range(12):
        (tmp_path / f"one-{number}").mkdir()
    table = Table.of_flow(tmp_path / path)
    for read in (lambda: table.get(b"k"), lambda: list(table.range()), lambda: list(table.map_entries("m"))):
        with pytest.raises(OptionError) as raised:
            read()
        assert raised.value.what == what.format(tmp_path / path)
        assert raised.value.detail.startswith(there.format(state=tmp_path))
        assert raised.value.detail.endswith(" and 3 more") == (path == "nothing/like/it")
    assert Table.of_flow(tmp_path / "flow" / "table").get(b"k") is None


def test_a_local_table_says_what_its_keys_are(tmp_path: Path) -> None:
    table: Any = Table.of_flow(tmp_path)
    for what, read in {
        "The key for get() of a Table is bytes, got str: 'ada'": lambda: table.get("ada"),
        "The start for range() of a Table is bytes, got int: 7": lambda: table.range(7),
        "The end for range() of a Table is bytes, got str: 'z'": lambda: table.range(b"a", "z"),
        "The prefix of a Table is bytes, got str: 'a'": lambda: table.prefix("a"),
        "The name for map_entries() of a Table is str, got bytes: b'm'": lambda: list(table.map_entries(b"m")),
    }.items():
        with pytest.raises(OptionError) as raised:
            read()
        assert raised.value.what == what


READER = """
import sys
from onceflow.errors import OptionError
from onceflow.tables.table import Table
table = Table.of_flow(sys.argv[1])
for line in sys.stdin:
    try:
        print(table.get(b"a"), [key for key, _ in table.range()], flush=True)
    except OptionError as error:
        print(error.what, flush=True)
"""


@pytest.mark.long_but("lmdb")
@pytest.mark.parametrize("opener", [LmdbStore, RocksdbStore], ids=["lmdb", "rocksdb"])
@pytest.mark.slow
def test_another_process_reads_a_local_table_while_a_flow_writes(opener: type[Store], tmp_path: Path) -> None:
    folder = partition_folder(tmp_path, "flow", "table", 0)
    goal = Goal("flow", "table", 0, "id-t", "id-i", 0, 0)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(folder.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        reader = process

        def seen() -> str:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
            return reader.stdout.readline().strip()

        assert seen() == f"There is no table in {folder.parent}"
        for turn in range(3):
            opened = open_partition(folder, opener, goal, Topics(), verify=False, now_ms=NOW)
            value = b"%d" % turn
            set_pending(opened.store, goal, CommitId(turn, 1, 1), [(b"va", rows.pack(value))], goal.table_end + 2, 0)
            before = f"{str(turn - 1).encode()} [b'a']" if turn else "None []"
            assert seen() == before
            goal = replace(goal, table_end=goal.table_end + 2, last=CommitId(turn, 1, 1))
            opened.store.close()
            assert settle(folder, opener, CommitId(turn, 1, 1))
            assert seen() == f"{value!r} [b'a']"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


# ---- damage ------------------------------------------------------------------------------------------

FLIPS = 96


@functools.cache
def _flow_of_many_rows() -> Flow:
    flow = Flow(seed=3, keys=2500, chunk_size=5000)
    for _ in range(4):
        flow.commit(flow.changes(2500))
    return flow


def damaged_flow() -> Flow:
    """Enough rows for a tree of three levels of pages, and a list of free pages. Each caller has a flow of its own."""
    made = _flow_of_many_rows()
    flow = Flow(keys=made.keys, chunk_size=made.topics.chunk_size)
    flow.batch, flow.goal, flow.rows = made.batch, made.goal, dict(made.rows)
    flow.dice.setstate(made.dice.getstate())
    flow.topics.ends = dict(made.topics.ends)
    flow.topics.records = {topic: dict(records) for topic, records in made.topics.records.items()}
    return flow


def flips(size: int) -> list[tuple[int, int]]:
    """Positions and masks: meta pages, heads of pages, anywhere."""
    dice = random.Random(11)
    found = []
    for at in range(FLIPS):
        if at % 3 == 0:
            position = dice.randrange(2) * 4096 + dice.randrange(152)
        elif at % 3 == 1:
            position = dice.randrange(size // 4096) * 4096 + dice.randrange(64)
        else:
            position = dice.randrange(size)
        found.append((position, dice.choice([1 << bit for bit in range(8)] + [255])))
    return found


def play_damaged(folder: Path, first: int, end: int, again: bool) -> None:
    """Opens one damaged copy after the other; one more batch shows whether it can be written, too."""
    pristine = (folder / "pristine").read_bytes()
    flow = damaged_flow()
    before = (flow.goal, dict(flow.topics.ends), dict(flow.rows), flow.dice.getstate())
    for at, (position, mask) in list(enumerate(flips(len(pristine))))[first:end]:
        print("begin", at, flush=True)
        place = folder / str(at)
        if not (again and at == first):
            place.mkdir()
            raw = bytearray(pristine)
            raw[position] ^= mask
            (place / "data.mdb").write_bytes(raw)
        opened = flow.open(place, LmdbStore, verify=True)
        if again and at == first:
            assert opened.how == "restored", "a process died of it, and it was opened again"
        how = opened.how
        flow.check(opened)
        flow.run(place, LmdbStore)
        opened = flow.open(place, LmdbStore)
        assert opened.how == "settled"
        flow.check(opened)
        forget(place)
        shutil.rmtree(place)
        flow.goal, flow.topics.ends, flow.rows = before[0], dict(before[1]), dict(before[2])
        flow.dice.setstate(before[3])
        print("end", at, how, flush=True)


def found_in(folder: Path, first: int, end: int) -> dict[int, str]:
    """What became of these flips. The engine may crash of one: then the next process begins with it."""
    found: dict[int, str] = {}
    again = False
    while len(found) < end - first:
        begin = first + len(found)
        command = [sys.executable, __file__, "damaged", str(folder), *map(str, (begin, end, int(again)))]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line.split() for line in done.stdout.splitlines()]
        found.update({int(line[1]): " ".join(line[2:]) for line in lines if line[0] == "end"})
        if done.returncode:
            assert done.returncode < 0, f"{done.stdout[-200:]}\n{done.stderr}"  # a signal: the engine crashed
            assert int(lines[-1][1]) == first + len(found), "it died of the flip after the last one"
            again = True
    return found


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.long) for at in range(FLIPS // 4, FLIPS, FLIPS // 4))]
)
@pytest.mark.slow
def test_flipped_bytes_anywhere_end_in_the_right_rows(tmp_path: Path, first: int) -> None:
    flow = damaged_flow()
    folder = tmp_path / "whole"
    opened = open_partition(folder, LmdbStore, flow.goal, flow.topics, verify=False, now_ms=NOW)
    set_pending(opened.store, flow.goal, CommitId(99, 1, 1), flow.changes(100), 10**6, 0)
    set_pending(opened.store, flow.goal, CommitId(99, 1, 1), flow.changes(300), 10**6, 0)
    opened.store.close()
    forget(folder)
    shutil.copy(folder / "data.mdb", tmp_path / "pristine")
    assert (tmp_path / "pristine").stat().st_size > 60 * 4096
    with ThreadPoolExecutor(2) as two:  # which wait for processes
        middle, end = first + FLIPS // 8, first + FLIPS // 4
        parts = two.map(lambda part: found_in(tmp_path, *part), [(first, middle), (middle, end)])
        found = {at: how for part in parts for at, how in part.items()}
    assert set(found) == set(range(first, end))
    assert set(found.values()) <= {"in sync", "caught up", "restored"}
    assert list(found.values()).count("restored") > len(found) // 4
    assert list(found.values()).count("in sync") > len(found) // 10  # what is not in use may change


@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 8192, 20_000, 65_536, -4096, -1])
@pytest.mark.parametrize("cached", [False, True])
def test_a_truncated_file_is_restored(folder: Path, size: int, cached: bool) -> None:
    flow = Flow(keys=800, chunk_size=500)
    flow.commit(flow.changes(800))
    flow.check(flow.open(folder, LmdbStore))
    if not cached:
        forget(folder)
    data = folder / "data.mdb"
    assert data.stat().st_size > size
    os.truncate(data, size if size >= 0 else data.stat().st_size + size)
    opened = flow.open(folder, LmdbStore)
    assert opened.how == "restored"
    flow.check(opened)


@pytest.mark.parametrize("cached", [False, True])
def test_a_garbage_lock_file_does_no_harm(folder: Path, cached: bool) -> None:
    flow = Flow()
    flow.run(folder, LmdbStore)
    if not cached:
        forget(folder)
    for content in (b"", b"garbage", random.Random(1).randbytes(100_000)):
        (folder / "lock").write_bytes(content)
        (folder / "lock").replace(folder / "lock.mdb")
        flow.check(flow.open(folder, LmdbStore, verify=True))
        flow.run(folder, LmdbStore)
        if not cached:
            forget(folder)
    flow.check(flow.open(folder, LmdbStore))


def test_a_process_that_dies_while_verifying_leaves_a_warning(opener: type[Store], folder: Path) -> None:
    flow = Flow()
    flow.run(folder, opener, settled=True)
    (folder / "verifying").parent.mkdir(parents=True, exist_ok=True)
    (folder / "verifying").touch()
    assert flow.goal.last is not None
    assert not settle(folder, opener, flow.goal.last)
    opened = flow.open(folder, opener)
    assert opened.how == "restored"
    assert "died" in opened.why
    assert not (folder / "verifying").exists()
    flow.check(opened)
    assert flow.open(folder, opener, verify=True).how == "in sync"


def test_only_a_dead_process_leaves_the_warning(folder: Path) -> None:
    flow = Flow()
    flow.run(folder, LmdbStore, settled=True)

    class Interrupted(LmdbStore):
        def checksum_holds(self) -> bool:
            assert (folder / "verifying").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flow.open(folder, Interrupted, verify=True)
    assert flow.open(folder, LmdbStore, verify=True).how == "in sync"
    assert not (folder / "verifying").exists()


class Dying(LmdbStore):
    """An engine that does not survive what it reads."""

    def checksum_holds(self) -> bool:
        os.kill(os.getpid(), signal.SIGSEGV)
        return True


def play_dying(folder: Path) -> None:
    flow = Flow()
    flow.commit(flow.changes())
    flow.open(folder, Dying, verify=True)


@pytest.mark.slow
def test_a_crash_of_the_engine_leads_to_a_restore(folder: Path) -> None:
    flow = Flow()
    flow.commit(flow.changes())
    flow.open(folder, LmdbStore).store.close()
    forget(folder)
    done = subprocess.run([sys.executable, __file__, "dying", str(folder)], capture_output=True)
    assert done.returncode == -signal.SIGSEGV
    opened = flow.open(folder, LmdbStore, verify=True)
    assert opened.how == "restored"
    flow.check(opened)


def play_restore(folder: Path, when: str) -> None:
    """Says so after every chunk, or after every block that is written, and waits to be killed after some."""
    catch_up._WRITTEN_ROWS = 100
    catch_up._COMMITTED_S = 0.0 if when == "between commits" else 1000.0
    spool._BLOCK_ROWS = 20
    flow = damaged_flow()
    flow.topics.chunk_size = 100
    put_new, blocks = LmdbStore.put_new, []

    def wait() -> None:
        print("now", flush=True)
        sys.stdin.read()

    def progress(records: int) -> None:
        if when != "in a commit" and records >= 3000:
            wait()

    def written(*args: Any, **options: Any) -> bool:
        done = put_new(*args, **options)
        blocks.append(done)
        if when == "in a commit" and len(blocks) == 10:
            wait()
        return done

    LmdbStore.put_new = written  # type: ignore[method-assign]
    open_partition(folder, LmdbStore, flow.goal, flow.topics, verify=False, now_ms=NOW, progress=progress)


@pytest.mark.long_but("in a commit")
@pytest.mark.parametrize("when", ["before a commit", "in a commit", "between commits"])
@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_restore(folder: Path, when: str) -> None:
    command = [sys.executable, __file__, "restore", str(folder), when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.kill()
        process.wait()
    if when != "between commits":  # blocks of keys become visible together
        left = LmdbStore.open(folder)
        assert left.row_count() == 0
        left.close()
    flow = damaged_flow()
    opened = flow.open(folder, LmdbStore, verify=True)
    total = sum(len(records) for records in flow.topics.records.values())
    assert opened.how == "caught up"
    assert opened.records == total if when != "between commits" else 0 < opened.records < total - 2000
    flow.check(opened)


if __name__ == "__main__":
    action, place, *rest = sys.argv[1:]
    if action == "damaged":
        play_damaged(Path(place), int(rest[0]), int(rest[1]), again=bool(int(rest[2])))
    elif action == "dying":
        play_dying(Path(place))
    else:
        play_restore(Path(place), rest[0])
