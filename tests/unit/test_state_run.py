"""Batches of a table as its tasks run them, with Kafka played by lists: what is verified, and where copies lie."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import onceflow
from onceflow import hooks, serdes
from onceflow.admin.versions.promotion_timers import unfired
from onceflow.client.deadline import Deadline
from onceflow.clock import clock_ms
from onceflow.driver.step.table_state import TableState
from onceflow.errors import EnvironmentUnusableError
from onceflow.host import identity
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import NO_TIMER, Progress, TableProgress, decode, encode
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.joins.copies import InexactCopyError
from onceflow.state.local.format import CommitId
from onceflow.state.prepare import lacks, prepare_partition
from onceflow.state.spec import ProcessSpec, StateReport
from onceflow.state.stores import rocksdb_store
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_environment import forget
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.task.state_run import StateRun

sys.path.insert(0, str(Path(__file__).parent))
try:
    from table_topics import Count, Kafka
finally:
    sys.path.pop(0)

PARTITIONS = 2


class Flow:
    """The driver of one flow, and its tasks."""

    def __init__(self, state_dir: Path | None, store: type[Store] = LmdbStore, processor: Any = None, **more: Any):
        topics = TableTopics("table", "table-internal", "id-t", "id-i", PARTITIONS, 86_400_000, 1_000_000)
        self.spec = ProcessSpec("flow", "flow", processor or Count(), topics, store, state_dir, **more)
        ends = {name: dict.fromkeys(range(PARTITIONS), 0) for name in topics.ids}
        progress = Progress("flow", 0, {}, {}, changelogs=ends, time_ms=0)
        self.kafka = Kafka()
        self.table = TableState(self.spec, progress, source_partitions=[], lateness_ms=None, idle_s=30)
        self.outputs: list[pa.RecordBatch] = []
        self.counts: dict[str, int] = {}
        self.batch = 0

    def run(self, keys: Sequence[str] = (), *, now_ms: int = 0) -> list[StateReport]:
        """One batch in one task that has all partitions."""
        self.batch += 1
        moment = self.table.moment(self.batch, CommitId(self.batch, 9, self.batch), now_ms)
        run = StateRun(
            self.spec,
            moment,
            source=self.kafka,  # type: ignore[arg-type]
            changelog=self.kafka,
            emit=lambda batch, _: self.outputs.append(batch),
        )
        try:
            run.open(range(PARTITIONS))
            raw = pa.array([key.encode() for key in keys], pa.binary())
            rows = pa.record_batch({"key": raw, "value": pa.nulls(len(keys), pa.binary())})
            run.feed_placed(rows, key_partitions(raw, PARTITIONS))
            run.finish()
            reports = run.leave_pending(self.kafka.acknowledged())
        finally:
            run.close()
        self.kafka.commit()
        self.table.check(reports, moment)
        self.told = self.table.progress_after(reports, moment)
        self.table.on_commit(reports, moment)
        for report in reports:
            for name, count in report.counts.items():
                self.counts[name] = self.counts.get(name, 0) + count
        return reports

    def counted(self) -> dict[str, int]:
        """The state as the stores have it after a batch that changes nothing."""
        self.run()
        found = {}
        for partition in range(PARTITIONS):
            store = self.spec.store.open(self.spec.folder(partition))
            found |= {key[1:].decode(): int(re.findall(rb"\d+", row)[-1]) for key, row in store.scan(b"v", b"w")}
            store.close()
        return found


KEYS = [f"key-{n}" for n in range(40)]


@pytest.fixture(params=[LmdbStore, MemoryStore, RocksdbStore], ids=["lmdb", "memory", "rocksdb"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``boot("b")``: from here on the machine has started once more."""

    def boot_(name: str) -> None:
        monkeypatch.setattr(identity, "boot_id", lambda: name)

    boot_("first")
    return boot_


def alter(folder: Path) -> int:
    """What a torn LMDB file may be: every row is well-formed, some are wrong. Returns how many bytes were changed."""
    changed = 0
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".sst", ".log"):  # compressed
            whole = bytearray(file.read_bytes())
            for at in range(0, len(whole), 100):
                whole[at] ^= 1
                changed += 1
            file.write_bytes(whole)
        elif file.name == "data.mdb":
            with file.open("r+b") as raw:
                for found in re.finditer(rb'"count":\s?1(\d)', raw.read()):
                    raw.seek(found.start(1))
                    raw.write(b"9" if found[1] != b"9" else b"8")
                    changed += 1
    return changed


@pytest.mark.parametrize("store", [LmdbStore, RocksdbStore], ids=["lmdb", "rocksdb"])
@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "another process"])
def test_a_copy_is_verified_again_after_its_machine_has_started_again(
    tmp_path: Path, boot: Any, store: type[Store], reopened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    flow = Flow(tmp_path, store)
    for _ in range(3):
        flow.run(KEYS)
    assert flow.counted() == dict.fromkeys(KEYS, 103)
    before = flow.kafka.read_records
    boot("second")
    if reopened:
        forget(flow.spec.folder(1))
    assert alter(flow.spec.folder(1))
    reports = flow.run(KEYS)
    assert flow.counted() == dict.fromkeys(KEYS, 104)
    assert [report.how for report in reports] == ["in sync", "restored"]
    assert "its checksum does not match" in caplog.text or store is RocksdbStore
    assert flow.kafka.read_records > before


def test_a_copy_is_verified_once_for_each_start_of_its_machine(
    tmp_path: Path, boot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = []
    holds = LmdbStore.checksum_holds
    monkeypatch.setattr(LmdbStore, "checksum_holds", lambda store: checksums.append(1) or holds(store))
    flow = Flow(tmp_path)
    flow.run(KEYS)  # made by this run: nothing to verify
    for name, times in (("first", 0), ("second", PARTITIONS), ("second", 0), ("first", 0), ("third", PARTITIONS)):
        boot(name)
        checksums.clear()
        flow.run(KEYS)
        assert len(checksums) == times


@pytest.mark.parametrize("what", ["boot_id", "_mounts", "gethostname"])
def test_hosts_are_told_apart_by_name_boot_and_container(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = identity.host_identity()
    assert identity.host_identity() == here
    monkeypatch.setattr(identity.socket if what == "gethostname" else identity, what, lambda: "of another")
    assert identity.host_identity() != here


@pytest.mark.parametrize("other_machine", [True, False])
def test_hosts_of_one_name_verify_their_own_copies(tmp_path: Path, boot: Any, other_machine: bool) -> None:
    """Two machines or containers that were given the same name, or executors of one machine with their own folders."""
    flow = Flow(tmp_path / "one")
    flow.run(KEYS)
    there = Flow(tmp_path / "other")
    there.kafka, there.table = flow.kafka, flow.table
    there.run(KEYS)
    assert alter(there.spec.folder(0))
    if other_machine:
        boot("of the other machine")
    else:  # a run that has not seen the other folder yet
        flow.table._verified = {(flow.spec.location(), partition) for partition in range(PARTITIONS)}
    there.batch = flow.batch = 2
    there.run(KEYS)
    assert there.counted() == dict.fromkeys(KEYS, 103)


def test_a_boot_that_cannot_be_told_is_one_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = identity.boot_id()
    assert identity.boot_id() == known
    monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(identity, "_MOUNTS", tmp_path / "none")
    monkeypatch.setattr(identity.sys, "platform", "freebsd")
    identity.boot_id.cache_clear()
    try:
        assert identity.boot_id() == identity.boot_id() != known
        assert identity.host_identity().endswith("/0")
    finally:
        identity.boot_id.cache_clear()


# ---- folders -----------------------------------------------------------------------------------------


def test_every_host_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec travels from the driver; variable and home are those of the process that opens the stores."""
    flow = Flow(None)
    for name in ("one", "other"):
        monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path / name))
        flow.run(KEYS)
        assert LmdbStore.exists(tmp_path / name / "flow" / "table" / "0")
    monkeypatch.delenv("ONCEFLOW_STATE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flow.run(KEYS)
    assert LmdbStore.exists(tmp_path / "home" / ".local" / "state" / "onceflow" / "flow" / "table" / "1")
    assert flow.counted() == dict.fromkeys(KEYS, 103)


@pytest.mark.parametrize("given, local, expected", [(None, True, "driver"), (None, False, None), ("x", False, "x")])
def test_the_driver_decides_for_its_own_machine_only(
    given: str | None, local: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.planning.process import StepOptions, make_spec

    monkeypatch.setenv("ONCEFLOW_STATE_DIR", "driver")
    options = StepOptions("table", None, "fail", None, None, None, "lmdb", given, False, "30 seconds")
    topics = Flow(None).spec.topics
    spec = make_spec(options, Count(), topics, flow="flow", flow_key="flow", source_topic=None, local=local)
    assert spec.state_dir == (None if expected is None else Path(expected))


@pytest.mark.parametrize("store", [LmdbStore, RocksdbStore], ids=["lmdb", "rocksdb"])
@pytest.mark.parametrize("below", ["file/state", "x" * 300])
def test_a_folder_that_cannot_be_made_is_told_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[Store], below: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONCEFLOW_STATE_DIR", str(tmp_path / below))
    with pytest.raises(EnvironmentUnusableError) as raised:
        Flow(None, store).run(KEYS)
    folder = tmp_path / below / "flow" / "table" / "0"
    assert raised.value.what == f"The local state cannot be opened: {folder} on host {socket.gethostname()}"
    assert "ONCEFLOW_STATE_DIR on that host" in str(raised.value)


# ---- timers ------------------------------------------------------------------------------------------


class Bells(Processor):
    """Every record sets a timer for the same moment."""

    def process(self, key: bytes, records: Sequence[Any], state: Any) -> None:
        state.timers.register("bell", 50, clock="processing")

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
        return [Record(key, b"rings")]


def test_a_table_knows_of_timers_that_a_batch_has_left(tmp_path: Path) -> None:
    flow = Flow(tmp_path, processor=Bells(), max_timers_per_batch=5)
    flow.run(KEYS)
    assert not flow.table.timers_left
    assert flow.table.due(49) == set()
    in_partitions = [0] * PARTITIONS
    for partition in key_partitions(pa.array([key.encode() for key in KEYS], pa.binary()), PARTITIONS).tolist():
        in_partitions[partition] += 1
    for batches in range(1, 10):
        left = {partition for partition, count in enumerate(in_partitions) if count > 5 * (batches - 1)}
        assert flow.table.due(50) == left
        if not left:
            break
        reports = flow.run(now_ms=50)
        left = {partition for partition, count in enumerate(in_partitions) if count > 5 * batches}
        assert {report.partition for report in reports if report.timers_left} == left
        assert flow.table.timers_left == bool(left)
    assert flow.counts["timers_fired"] == len(KEYS)
    assert sorted(key for batch in flow.outputs for key in batch["key"].to_pylist()) == sorted(map(str.encode, KEYS))


def test_progress_tells_which_timers_a_batch_has_not_fired(tmp_path: Path) -> None:
    """Those that were more than one batch may fire, and those that were registered for a time that had passed."""
    flow = Flow(tmp_path, processor=Bells(), max_timers_per_batch=10)

    def left() -> int:
        ends, known = flow.told
        progress = Progress("flow", flow.batch, {}, {}, 0, changelogs=ends, tables={"table": known})
        reader: Any = flow.kafka
        ids = unfired(reader, progress, ["table"], Deadline(10, "reading")).get("table", frozenset())
        assert {each[1:] for each in ids} <= {("bell", "processing", 50)}
        return len(ids)

    flow.run(KEYS)
    assert (flow.told[1].fired, flow.told[1].unfired, left()) == ({}, (), 0)
    flow.run(now_ms=70)
    assert (flow.told[1].fired, flow.told[1].soonest) == ({"processing": 70}, {"processing": 50})
    assert flow.told[1].unfired
    assert left() == len(KEYS) - flow.counts["timers_fired"]
    for now_ms in (80, 90):
        flow.run(now_ms=now_ms)
    assert (flow.told[1].fired, flow.told[1].soonest) == ({"processing": 90}, {"processing": NO_TIMER})
    assert (flow.told[1].unfired, left()) == ((), 0)
    flow.run(KEYS[:1], now_ms=90)
    assert len(flow.told[1].unfired) == left() == 1


def test_progress_tells_whether_there_were_timers_in_processing_time(tmp_path: Path) -> None:
    flow = Flow(tmp_path / "bells", processor=Bells())
    flow.run()
    assert flow.told[1].processing_timers is False  # all partitions were opened
    flow.run(KEYS[:1])
    assert flow.told[1].processing_timers is True
    for _ in range(2):
        flow.run(now_ms=50)
    assert flow.told[1].soonest == {"processing": NO_TIMER}
    assert flow.told[1].processing_timers is True  # some have fired
    flow = Flow(tmp_path / "notes", processor=Expiring())
    flow.run(KEYS)
    assert flow.table.facts().next_timer_ms["processing"] is not None
    assert flow.told[1].processing_timers is False  # expiry has no outputs
    # It stays known when a flow starts again, before it has opened its partitions.
    for known in (True, False, None):
        ends, table = flow.told
        progress = Progress("flow", 1, {}, {}, 0, ends, tables={"table": replace(table, processing_timers=known)})
        again = TableState(flow.spec, progress, source_partitions=[], lateness_ms=None, idle_s=30)
        moment = again.moment(2, CommitId(2, 9, 2), 0)
        assert again.progress_after([], moment)[1].processing_timers is known


def test_progress_tells_how_far_event_time_is_in_each_partition(tmp_path: Path) -> None:
    """A run that ends soon is not the first that has seen nothing of a partition."""
    spec = Flow(tmp_path).spec
    origins = [("in", 0), ("in", 1)]

    def made(known: TableProgress) -> TableState:
        progress = Progress("flow", 1, {}, {}, 0, {key: {} for key in spec.topics.ids}, tables={"table": known})
        return TableState(spec, progress, source_partitions=origins, lateness_ms=0, idle_s=30)

    def ran(table: TableState, latest: dict[Any, int]) -> TableProgress:
        table.planned(latest, {})
        moment = table.moment(2, CommitId(2, 9, 2), 0)
        report = StateReport("table", 0, "", moment.commit, "", 0, 0.0, None, None, max_event_ms=latest)
        progress = Progress("flow", 2, {}, {}, 0, tables={"table": table.progress_after([report], moment)[1]})
        return decode(*encode(progress)).tables["table"]

    known = ran(made(TableProgress()), {("in", 0): 500})
    assert known.watermark_ms is None
    assert {origin: each.latest_ms for origin, each in known.event_times.items()} == {("in", 0): 500, ("in", 1): None}
    assert all(abs(clock_ms() - each.since_ms) < 30_000 for each in known.event_times.values())
    assert ran(made(known), {("in", 0): 600}).watermark_ms is None
    an_hour_ago = {
        origin: each._replace(since_ms=each.since_ms - 3_600_000) for origin, each in known.event_times.items()
    }
    later = made(replace(known, event_times=an_hour_ago))
    assert ran(later, {("in", 0): 600}).watermark_ms == 600
    table = TableState(
        spec,
        Progress("flow", 1, {}, {}, 0, {key: {} for key in spec.topics.ids}, tables={"table": known}),
        source_partitions=origins,
        lateness_ms=None,
        idle_s=30,
    )
    assert ran(table, {}).event_times == {}, "the step does not use event time any more"


def test_a_restart_knows_how_far_the_step_before_was(tmp_path: Path) -> None:
    """Its partitions are no source partitions: only progress names them."""
    spec = Flow(tmp_path).spec
    told, last = TableProgress(), 0

    def started() -> TableState:
        progress = Progress("flow", 1, {}, {}, last, {key: {} for key in spec.topics.ids}, tables={"table": told})
        return TableState(spec, progress, source_partitions=[], lateness_ms=0, idle_s=30)

    table, seen = started(), []
    for again, latest in ((False, {0: 5_000}), (False, {1: 1_000}), (True, {0: 6_000}), (True, {0: 7_000, 1: 6_500})):
        if again:
            table = started()
        table.planned([("in", 0)], {})
        moment = table.moment(2, CommitId(2, 9, 2), 0)
        times: dict[Any, int] = {(None, partition): ms for partition, ms in latest.items()}
        report = StateReport("table", 0, "", moment.commit, "", 0, 0.0, None, None, max_event_ms=times)
        last = clock_ms()
        progress = Progress("flow", 2, {}, {}, last, tables={"table": table.progress_after([report], moment)[1]})
        told = decode(*encode(progress)).tables["table"]
        table.on_commit([report], moment)
        seen.append((moment.watermark_ms, told.watermark_ms))
    assert seen == [(None, 5_000), (5_000, 5_000), (5_000, 5_000), (5_000, 6_500)]


def test_the_time_without_a_flow_is_no_silence_if_a_start_has_committed_since(tmp_path: Path) -> None:
    """A start may commit where a topic is read from, and commands commit, too: event time is no later then."""
    spec = Flow(tmp_path).spec
    ends: dict[str, dict[int, int]] = {key: {} for key in spec.topics.ids}
    hour_ago = clock_ms() - 3_600_000

    def ran(progress: Progress, latest: dict[Any, int]) -> Progress:
        table = TableState(spec, progress, source_partitions=[], lateness_ms=0, idle_s=30)
        table.planned([("in", 0)], {})
        moment = table.moment(2, CommitId(2, 9, 2), 0)
        report = StateReport("table", 0, "", moment.commit, "", 0, 0.0, None, None, max_event_ms=latest)
        told = {"table": table.progress_after([report], moment)[1]}
        return decode(*encode(Progress("flow", 2, {}, {}, clock_ms(), ends, tables=told)))

    first = ran(Progress("flow", 1, {}, {}, clock_ms(), ends), {(None, 0): 1_000, (None, 1): 1_000})
    content = json.loads(encode(first)[1])
    content["time_ms"] -= 3_600_000
    content["tables"]["table"]["event_times"][""] = {"0": [1_000, hour_ago], "1": [1_000, hour_ago]}
    content["tables"]["table"].pop("event_times_ms", None)  # as before this field
    then = decode(b"flow", json.dumps(content).encode())
    of_start = decode(*encode(replace(then, offsets={"new": {0: 0}}, time_ms=clock_ms())))
    for progress in (then, of_start):
        assert ran(progress, {(None, 1): 20_000}).tables["table"].watermark_ms == 1_000


class Expiring(Processor):
    """Every record expires."""

    def process(self, key: bytes, records: Sequence[Any], state: Any) -> None:
        state.put(b"x", ttl="1 hour")


class Notes(Processor):
    """A key has a value, entries that expire, and a timer. When one that ends with x comes again, they are deleted."""

    key = serdes.STRING
    state = serdes.JSON

    def process(self, key: str, records: Sequence[Any], state: Any) -> None:
        notes = state.map("notes")
        if key.endswith("x") and state.get() is not None:
            state.delete()
            notes.clear()
            state.timers.cancel("bell")
        else:
            state.put(len(records))
            notes.put(f"{len(records)}", 1, ttl="1 hour")
            state.timers.register("bell", 1_000_000 + len(records), "processing")

    def on_timer(self, key: str, timer: Any, state: Any) -> None: ...


def test_a_table_knows_its_rows_and_what_was_restored(tmp_path: Path, store: type[Store]) -> None:
    """After each batch, although its changes are applied with the next one."""
    flow = Flow(tmp_path, store, Notes())
    chance = random.Random(5)
    for _ in range(6):
        flow.run([*chance.choices(KEYS, k=20), *chance.choices([f"{key}x" for key in KEYS[:6]], k=4)])
        facts = flow.table.facts()
        flow.run()  # applies them
        assert flow.table.facts().rows == facts.rows
        kinds: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            with closing(store.open(flow.spec.folder(partition))) as opened:
                kinds.update(chr(key[0]) for key, _ in opened.scan(b""))
        assert facts.rows == {"value": kinds["v"], "entry": kinds["m"], "timer": kinds["t"]}
        assert kinds["X"] == kinds["m"] >= kinds["v"] == kinds["t"] == kinds["T"] > 0
    assert (facts.table, facts.partitions, facts.opened) == ("table", PARTITIONS, PARTITIONS)
    assert facts.next_timer_ms["event"] is None
    assert facts.next_timer_ms["processing"] is not None
    assert (facts.nbytes or 0) > 0 or not store.on_disk
    assert (facts.restored, facts.waiting_letters) == (0, False)
    told: list[Any] = []
    forget = hooks.observe(lambda step, **found: told.append(found) if step == hooks.RESTORED else None)
    for partition in range(PARTITIONS):
        store.remove(flow.spec.folder(partition))
    flow.run()
    forget()
    again = flow.table.facts()
    assert again.rows == facts.rows
    assert again.restored == flow.kafka.read_records == sum(each["records"] for each in told) > 0
    assert again.restore_seconds == sum(each["seconds"] for each in told) > 0
    assert {(each["flow"], each["table"]) for each in told} == {("flow", "table")}


# ---- before a batch ----------------------------------------------------------------------------------


def test_a_prepared_partition_is_in_sync_when_the_batch_begins(tmp_path: Path, store: type[Store]) -> None:
    flow = Flow(tmp_path / "here", store)
    flow.run(KEYS)
    flow.run(KEYS)
    records = flow.kafka.read_records
    elsewhere = replace(flow.spec, state_dir=tmp_path / "elsewhere")
    moment = flow.table.moment(0, CommitId(-1, -1, -1), 0)
    ends = [len(flow.kafka.committed["table", partition]) - 1 for partition in range(PARTITIONS)]
    assert [lacks(elsewhere, moment, partition) for partition in range(PARTITIONS)] == ends
    found = [prepare_partition(elsewhere, moment, partition, flow.kafka) for partition in range(PARTITIONS)]
    assert [each.how for each in found] == ["restored"] * PARTITIONS
    assert sum(each.records for each in found) == flow.kafka.read_records - records == 2 * len(KEYS)
    flow.table.prepared(found)
    flow.spec = elsewhere
    records = flow.kafka.read_records
    assert [report.how for report in flow.run(KEYS)] == ["in sync"] * PARTITIONS
    assert flow.counted() == dict.fromkeys(KEYS, 103)
    assert flow.kafka.read_records == records


def test_what_a_copy_lacks_is_known_before_it_is_opened(tmp_path: Path, store: type[Store]) -> None:
    flow = Flow(tmp_path, store)

    def lacking(partition: int) -> int | None:
        return lacks(flow.spec, flow.table.moment(0, CommitId(-1, -1, -1), 0), partition)

    assert lacking(0) == 0
    flow.run(KEYS)
    assert lacking(0) == 0  # what is pending is of the transaction that was committed last
    older = tmp_path / "older"
    on_disk = store is not MemoryStore
    if on_disk:  # without the lock file: whoever closes it loses all locks of this process
        shutil.copytree(flow.spec.folder(0), older, ignore=shutil.ignore_patterns("lock.mdb"))
    flow.run(KEYS)
    flow.run(KEYS)
    assert lacking(0) == 0
    end = len(flow.kafka.committed["table", 0]) - 1
    store.remove(flow.spec.folder(0))
    assert lacking(0) == end
    if on_disk:
        shutil.copytree(older, flow.spec.folder(0), dirs_exist_ok=True)
        assert 0 < (lacking(0) or 0) <= end
        (flow.spec.folder(0) / "verifying").touch()
        assert lacking(0) == end
        (flow.spec.folder(0) / "verifying").unlink()
        flow.table._verified.clear()
        assert lacking(0) is None


@pytest.mark.parametrize("below", ["file/state", "x" * 300])
def test_a_folder_that_cannot_be_looked_at_is_told_with_its_host(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    flow = Flow(tmp_path / below)
    with pytest.raises(EnvironmentUnusableError, match="on host"):
        prepare_partition(flow.spec, flow.table.moment(0, CommitId(-1, -1, -1), 0), 0, flow.kafka)


def test_a_joined_table_that_cannot_be_seen_leaves_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this process would keep the write lock of RocksDB, and no other one could open the state again."""

    def refuse(self: StateRun, partition: int) -> None:
        raise InexactCopyError("compacted", next_step="none")

    flow = Flow(tmp_path, RocksdbStore)
    monkeypatch.setattr(StateRun, "_tables", refuse)
    with pytest.raises(InexactCopyError):
        flow.run(KEYS)
    assert not [folder for folder in rocksdb_store._open if str(tmp_path) in str(folder)]


class Ask(Processor):
    """Calls another service, which answers when records of two partitions ask at the same time."""

    def __init__(self, answer: Callable[[int], bytes]) -> None:
        self.ask = onceflow.concurrently(answer)

    def process(self, key: bytes, records: Any, state: Any) -> Any:
        state.put(self.ask(state.partition))
        yield Record(key, b"done")


def test_calls_for_all_partitions_of_a_task_are_made_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(PARTITIONS)

    def answer(partition: int) -> bytes:
        together.wait(10)
        return b"%d" % partition

    flow = Flow(tmp_path, processor=Ask(answer))
    keys = [f"k{n}" for n in range(100)]
    placed = key_partitions(pa.array([key.encode() for key in keys], pa.binary()), PARTITIONS).tolist()
    flow.run([keys[placed.index(partition)] for partition in range(PARTITIONS)])
    assert sum(batch.num_rows for batch in flow.outputs) == PARTITIONS
