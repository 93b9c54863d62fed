"""`onceflow verify --tables` and `--state-dir`: the topics of a flow's tables, and its copies on this machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from onceflow.admin.verify import local_copies
from onceflow.admin.verify.local_copies import LocalCopies
from onceflow.driver.record.progress_log import partition_of
from onceflow.errors import OptionError
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, encode
from onceflow.state.format import rows
from onceflow.state.local.format import COMMIT_RECORD, CommitRecord
from onceflow.state.stores.lmdb_environment import forget
from onceflow.state.stores.lmdb_store import LmdbStore

pytestmark = pytest.mark.integration


def changed(folder: Path, changes: dict[bytes, bytes | None]) -> None:
    """Write rows into a copy, with the checksum that belongs to them."""
    with contextlib.closing(LmdbStore.open(folder)) as store:
        store.write(changes, index=True)


def place(key: bytes) -> int:
    return int(key_partitions(pa.array([key]), 2)[0])


def texts(found: list[dict[str, Any]]) -> set[str]:
    return {each["text"].split(": ")[-1] for each in found}


def test_tables_and_copies(make_state_pipe: Callable[..., Any], verify: Any, onceflow_broker: str) -> None:
    pipe = make_state_pipe(partitions=2)
    with pytest.raises(OptionError, match="has no progress"):
        verify(pipe.flow, "--state-dir", str(pipe.tmp_path))
    internal = pipe.table + INTERNAL_SUFFIX
    pipe.fill(200)
    pipe.run()
    ours = ["--tables", "--state-dir", str(pipe.state_dir)]
    found, last = verify(pipe.flow, *ours)
    assert (found, last["notes"]) == ([], [])
    assert last["checked"]["local copies"] == 2
    assert last["checked"]["rows of local copies"] == last["checked"]["records of tables"] > 70
    with pytest.raises(OptionError, match="There is no copy of a table of the flow"):
        verify(pipe.flow, "--state-dir", str(pipe.tmp_path / "scratch"))

    producer = Producer({"bootstrap.servers": onceflow_broker})
    key = next(iter(pipe.table_rows()))
    wrong = 1 - place(key)
    producer.produce(pipe.table, b"{}", key, partition=wrong)
    long = next(each for n in range(99) if place(each := b"k" * 600 + b"%d" % n) == 0)  # which may be a row
    producer.produce(pipe.table, b"{}", long, partition=0)
    producer.produce(pipe.table, b"{}", b"new", partition=place(b"new"), headers={rows.VERSION_HEADER: b"7"})
    producer.produce(internal, b"no row", rows.timer_key(b"k", b"n"), partition=1)
    assert producer.flush(30) == 0
    found, last = verify(pipe.flow, "--tables", code=1)
    assert last["found"] == {"table": 3}, "they are behind what the flow has committed"
    pipe.fill(400)  # every key, and so every partition, is written once more
    pipe.run()
    found, last = verify(pipe.flow, "--tables", code=1)
    assert last["found"] == {"misplaced": 1, "state": 2}
    assert {each["text"] for each in found if each["kind"] == "state"} == {
        "it is of version 7 of the processor, the flow is at version 0",
        "it is no row of a map, and no timer",
    }
    (misplaced,) = [each for each in found if each["kind"] == "misplaced"]
    assert misplaced["text"] == f"the value of key {key!r} belongs to partition {1 - wrong} of 2"
    assert [each["partition"] for each in misplaced["places"]] == [wrong]
    assert f"3 records of {pipe.table} in no transaction: no processor wrote them" in last["notes"]
    assert f"1 record of {internal} in no transaction: no processor wrote them" in last["notes"]


def test_copies_that_differ(make_state_pipe: Callable[..., Any], verify: Any) -> None:
    pipe = make_state_pipe(partitions=1)
    pipe.fill(300)
    pipe.run()
    folder = pipe.folder / "0"
    ours = ["--state-dir", str(pipe.state_dir)]
    first, second = sorted(pipe.table_rows())[:2]
    with contextlib.closing(LmdbStore.open(folder)) as store:
        before = {rows.value_key(key): store.get(rows.value_key(key)) for key in (first, second)}
        raw = store.blob(COMMIT_RECORD) or b""
    changed(
        folder, {rows.value_key(first): rows.pack(b"wrong"), rows.value_key(second): None, b"vnew": rows.pack(b"1")}
    )
    found, last = verify(pipe.flow, *ours, code=1)
    assert last["found"] == {"local": 3}
    assert texts(found) == {
        f"the value of key {first!r} differs",
        f"the value of key {second!r} is not there",
        "the value of key b'new' is not in the topic",
    }
    changed(folder, {**before, b"vnew": None})
    assert verify(pipe.flow, *ours)[1]["exact"]

    record = CommitRecord.decode(raw)
    assert record is not None
    moved = CommitRecord(**{**vars(record), "table_end": record.table_end + 10}).encode()
    with contextlib.closing(LmdbStore.open(folder)) as store:
        store.write({}, {COMMIT_RECORD: moved})
    ((found_one,), _) = verify(pipe.flow, *ours, code=1)
    assert "is ahead of what is committed" in found_one["text"]
    with contextlib.closing(LmdbStore.open(folder)) as store:
        store.write({}, {COMMIT_RECORD: raw})

    data = (folder / "data.mdb").read_bytes()
    at = data.index(before[rows.value_key(first)] or b"")
    while at >= 0:  # also in pages that are not used any more
        data = data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :]
        at = data.find(before[rows.value_key(first)] or b"", at + 1)
    forget(folder)
    (folder / "data.mdb").write_bytes(data)
    found, last = verify(pipe.flow, *ours, code=1)
    assert last["found"] == {"local": 2}
    assert any("its checksum is not that of its rows" in each["text"] for each in found)
    forget(folder)
    (folder / "data.mdb").write_bytes(data[: len(data) // 2])
    found, last = verify(pipe.flow, *ours, code=1)
    assert last["found"] == {"local": 1}
    assert "is damaged" in found[0]["text"]


@pytest.mark.long
def test_a_table_that_is_replaced_meanwhile(
    make_state_pipe: Callable[..., Any], verify: Any, onceflow_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion is committed when the progress is read already, and before the copies are."""
    pipe = make_state_pipe(partitions=2)
    pipe.fill(100)
    pipe.run()
    ours = ["--state-dir", str(pipe.state_dir)]
    run, read = LocalCopies.run, local_copies.read_history
    before: list[Progress] = []

    def replaced(copies: LocalCopies, state_dir: Path, progress: Progress) -> None:
        before.append(progress)
        tables = {f"{pipe.table}-next": progress.tables[pipe.table]}
        ends = {f"{table}-next": dict.fromkeys(offsets, 0) for table, offsets in progress.changelogs.items()}
        publish(replace(progress, tables=tables, changelogs=ends))
        run(copies, state_dir, progress)

    def publish(progress: Progress) -> None:
        key, value = encode(progress)
        producer = Producer({"bootstrap.servers": onceflow_broker})
        producer.produce(PROGRESS_TOPIC, value, key, partition_of(pipe.flow))
        assert producer.flush(30) == 0

    monkeypatch.setattr(LocalCopies, "run", replaced)
    found, last = verify(pipe.flow, *ours)
    assert (found, last["notes"], last["checked"]["local copies"]) == ([], [], 2)
    assert last["checked"]["rows of local copies"] > 0

    publish(before[0])
    with contextlib.closing(LmdbStore.open(pipe.folder / "1")) as store:
        record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
        assert record is not None
        store.write({}, {COMMIT_RECORD: replace(record, table_end=record.table_end + 10).encode()})
    ((ahead,), _) = verify(pipe.flow, *ours, code=1)
    assert ahead["text"] == f"{pipe.table}-1 in {pipe.folder / '1'} is ahead of what is committed"

    publish(before[0])
    monkeypatch.setattr(local_copies, "read_history", lambda *given: read(*given)[-1:])  # as compaction leaves it
    found, last = verify(pipe.flow, *ours)
    assert found == []
    why = "only its checksum is compared, because the flow has replaced the table meanwhile"
    assert [note.split(": ")[-1] for note in last["notes"]] == [why, why]


def test_a_copy_that_is_too_old_to_compare(make_state_pipe: Callable[..., Any], verify: Any, tmp_path: Path) -> None:
    """Kafka removes a row that was deleted later, and at last its tombstone: then nobody knows that it was there."""
    pipe = make_state_pipe(partitions=1)
    pipe.fill(100)
    pipe.run()
    old = tmp_path / "old"
    shutil.copytree(pipe.state_dir, old)
    pipe.fill(40)
    pipe.run()
    with contextlib.closing(LmdbStore.open(old / pipe.flow / pipe.table / "0")) as store:
        record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
        assert record is not None
        day_ms = 86_400_000
        store.write(
            {b"vdeleted later": rows.pack(b"1")},
            {COMMIT_RECORD: replace(record, time_ms=record.time_ms - day_ms).encode()},
            index=True,
        )
    found, last = verify(pipe.flow, "--state-dir", str(old))
    assert found == []
    (note,) = last["notes"]
    assert "only its checksum is compared, because it is so old" in note
    assert verify(pipe.flow, "--state-dir", str(pipe.state_dir))[1]["notes"] == []
