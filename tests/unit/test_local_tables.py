"""Tables without a changelog: what a local store has is used only if it is what was committed last."""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow import serdes
from onceflow.driver.step.table_state import TableState
from onceflow.errors import OptionError, ProgressConflictError, ProtocolError
from onceflow.planning import process, table_plan
from onceflow.planning.process import StepOptions
from onceflow.protocol import progress as records
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import LocalTable, Progress, TableProgress
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.changelog.topics import TableTopics, without_topics
from onceflow.state.local.catch_up import IN_SYNC, LOST, SETTLED
from onceflow.state.local.format import CommitId, CommitRecord
from onceflow.state.local.opening import settle
from onceflow.state.prepare import lacks, prepare_partition
from onceflow.state.spec import ProcessSpec, StateReport
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_environment import forget
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.task import state_run as run_module
from onceflow.task.state_run import StateRun

PARTITIONS = 2
KEYS = [f"key-{n}" for n in range(11)] + ["key" * 400]


class Count(Processor):
    """How many records a key has had."""

    key = serdes.STRING
    state = output = serdes.LONG

    def process(self, key: str, records: Sequence[Any], state: Any) -> Any:
        state.put(state.get(0) + len(records))
        return [Record(key, state.get())]


class NoKafka:
    """Nothing is read from Kafka, and no row of a table is written there."""

    def read(self, *arguments: Any) -> Any:
        raise AssertionError(f"read {arguments}")

    def write_to(self, *arguments: Any) -> Any:
        raise AssertionError(f"written {arguments}")


class Flow:
    """The driver of one flow, and its tasks. ``restart`` keeps nothing but progress, as Kafka has it."""

    def __init__(self, state_dir: Path, store: type[Store] = LmdbStore) -> None:
        options = made_options()
        _, self.progress = table_plan.plan_local_table(options, Count(), PARTITIONS, Progress("flow", 0, {}, {}, 0))
        self.store = store
        self.epoch = 0
        self.restart(state_dir)

    def restart(self, state_dir: Path) -> None:
        self.progress = records.decode(*records.encode(self.progress))
        topics, same = table_plan.plan_local_table(made_options(), Count(), 99, self.progress)
        assert same is self.progress
        self.spec = ProcessSpec("flow", "flow", Count(), topics, self.store, state_dir)
        self.table = TableState(self.spec, self.progress, source_partitions=[], lateness_ms=None, idle_s=30)

    def attempt(self, keys: Sequence[str], *, committed: bool = True, opened: Sequence[int] = ()) -> list[StateReport]:
        """An attempt of the next batch, in one task; it opens the partitions of its keys."""
        self.epoch += 1
        batch = self.progress.batch_id + 1
        moment = self.table.moment(batch, CommitId(batch, 9, self.epoch), 0)
        kafka: Any = NoKafka()
        run = StateRun(self.spec, moment, source=kafka, changelog=kafka, emit=lambda rows, partition: None)
        try:
            run.open(opened)
            raw = pa.array([key.encode() for key in keys], pa.binary())
            rows = pa.record_batch({"key": raw, "value": pa.nulls(len(keys), pa.binary())})
            run.feed_placed(rows, key_partitions(raw, PARTITIONS))
            run.finish()
            reports = run.leave_pending({})
        finally:
            run.close()
        if not committed:
            self.table.prepared(run.brought_up)
            return reports
        ends, known = self.table.progress_after(reports, moment)
        assert ends == {}
        self.progress = Progress(
            "flow", batch, {}, {}, 0, tables={"t": known}, producer_id=9, producer_epoch=self.epoch
        )
        self.table.on_commit(reports, moment)
        return reports

    def counted(self) -> Counter[str]:
        """The committed state of all partitions, read by a batch that changes nothing and is not committed."""
        self.attempt([], committed=False, opened=range(PARTITIONS))
        found: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            store = self.store.open(self.spec.folder(partition))
            found.update({key[1:].decode(): serdes.LONG.decode(row[1:]) for key, row in store.scan(b"v", b"w")})
            store.close()
        return found


def made_options(**given: Any) -> StepOptions:
    defaults: dict[str, Any] = {
        "table": "t", "partitions": None, "on_error": "fail", "dead_letter_topic": None, "late_topic": None,
        "retention": None, "store": "lmdb", "state_dir": None,
        "adopt_existing": False, "idle_timeout": "30 seconds", "changelog": False,
    }  # fmt: skip
    return StepOptions(**{**defaults, **given})


def in_partition(partition: int) -> list[str]:
    placed = key_partitions(pa.array([key.encode() for key in KEYS], pa.binary()), PARTITIONS).tolist()
    return [key for key, at in zip(KEYS, placed, strict=True) if at == partition]


@pytest.fixture(params=[LmdbStore, RocksdbStore], ids=["lmdb", "rocksdb"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_batch_after_batch_and_restarts(tmp_path: Path, store: type[Store]) -> None:
    flow = Flow(tmp_path, store)
    assert {report.how for report in flow.attempt(KEYS)} == {IN_SYNC}
    assert {report.how for report in flow.attempt(KEYS)} == {SETTLED}
    flow.restart(tmp_path)
    flow.attempt(in_partition(0))
    flow.restart(tmp_path)
    flow.attempt(in_partition(0))
    flow.restart(tmp_path)
    # Partition 1 has changes of an earlier transaction than the one in progress; they are committed, too.
    assert [report.how for report in flow.attempt([], committed=False, opened=[1])] == [SETTLED]
    assert flow.counted() == Counter(KEYS * 2 + in_partition(0) * 2)
    assert flow.table.take_lost() == 0


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    flow = Flow(tmp_path)
    flow.attempt(KEYS)
    for _ in range(2):
        flow.attempt(KEYS, committed=False)
    flow.restart(tmp_path)
    flow.attempt(KEYS, committed=False)
    flow.attempt(KEYS)
    assert flow.counted() == Counter(KEYS * 2)


def test_a_flow_that_ends_settles_its_copies(tmp_path: Path) -> None:
    flow = Flow(tmp_path)
    flow.attempt(KEYS)
    for partition, commit in flow.table.last.items():
        assert settle(flow.spec.folder(partition), flow.store, commit)
    assert {report.how for report in flow.attempt(KEYS)} == {IN_SYNC}


def removed(flow: Flow, tmp_path: Path, older: Path) -> None:
    shutil.rmtree(flow.spec.folder(0))


def older_copy(flow: Flow, tmp_path: Path, older: Path) -> None:
    shutil.rmtree(flow.spec.folder(0))
    shutil.copytree(older, flow.spec.folder(0))


def damaged(flow: Flow, tmp_path: Path, older: Path) -> None:
    for file in flow.spec.folder(0).glob("data.mdb"):
        raw = bytearray(file.read_bytes())
        raw[8192:] = bytes(len(raw) - 8192)
        file.write_bytes(raw)


def of_an_earlier_life(flow: Flow, tmp_path: Path, older: Path) -> None:
    """The same batch numbers and producer, but the flow was reset in between."""
    known = flow.progress.tables["t"].local
    assert known is not None
    life = TableProgress(local=LocalTable("another", PARTITIONS, known.last))
    flow.progress = Progress("flow", flow.progress.batch_id, {}, {}, 0, tables={"t": life})
    flow.restart(tmp_path)


def newer_copy(flow: Flow, tmp_path: Path, older: Path) -> None:
    """Progress has gone back to what it was before the last batch."""
    known = flow.progress.tables["t"].local
    assert known is not None
    life = TableProgress(local=LocalTable(known.table_id, PARTITIONS, {0: (1, 9, 1), 1: (1, 9, 1)}))
    for partition, commit in flow.table.last.items():
        settle(flow.spec.folder(partition), flow.store, commit)
    flow.progress = Progress("flow", 1, {}, {}, 0, tables={"t": life})
    flow.restart(tmp_path)


@pytest.mark.parametrize(
    "happens, why",
    [
        (removed, "no local copy of it on this host"),
        (older_copy, "it is at batch 1, but batch 3 has changed it"),
        (damaged, ""),
        (of_an_earlier_life, "an earlier life"),
        (newer_copy, "ahead of what is committed"),
    ],
)
def test_what_cannot_be_right_is_not_used(
    tmp_path: Path, happens: Callable[..., None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counting on in any other state than the committed one would count records twice, or without an end."""
    caplog.set_level(logging.WARNING)
    flow = Flow(tmp_path / "state")
    flow.attempt(KEYS)
    flow.attempt([], committed=False, opened=range(PARTITIONS))  # applies the changes
    older = tmp_path / "older"
    shutil.copytree(flow.spec.folder(0), older)
    flow.attempt(KEYS)
    flow.attempt(KEYS)
    for partition in range(PARTITIONS):
        forget(flow.spec.folder(partition))
    flow.restart(tmp_path / "state")
    happens(flow, tmp_path / "state", older)
    for partition in range(PARTITIONS):
        forget(flow.spec.folder(partition))
    flow.attempt(KEYS, committed=False)  # a failed attempt in between changes nothing
    lost = {report.partition for report in flow.attempt(KEYS) if report.how == LOST}
    assert 0 in lost
    assert flow.table.take_lost() == len(lost)
    assert caplog.text.count("the state of table t-0 is lost, and the partition begins empty") == 1
    assert why in caplog.text
    assert {key: count for key, count in flow.counted().items() if key in in_partition(0)} == dict.fromkeys(
        in_partition(0), 1
    )
    flow.restart(tmp_path / "state")
    assert flow.attempt(KEYS)[0].how in (IN_SYNC, SETTLED)
    assert flow.counted()[in_partition(0)[0]] == 2
    assert flow.table.take_lost() == 0


def test_a_loss_is_told_again_until_the_partition_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even a process that dies after it has found no copy may hide the loss."""
    flow = Flow(tmp_path / "state")
    flow.attempt(KEYS)
    shutil.rmtree(flow.spec.folder(0))
    forget(flow.spec.folder(0))
    for _ in range(3):
        flow.restart(tmp_path / "state")
        assert flow.attempt([], committed=False, opened=[0])[0].how == LOST
        assert flow.table.take_lost() == 1
    flow.attempt(in_partition(0))
    flow.restart(tmp_path / "state")
    assert flow.attempt([], committed=False, opened=[0])[0].how == SETTLED


@pytest.mark.parametrize("seed", range(6))
def test_random_lives(tmp_path: Path, seed: int) -> None:
    """Whatever happens: the state of a partition is the fold of all records since it was told to be lost."""
    dice = random.Random(seed)
    hosts = [tmp_path / "one", tmp_path / "other"]
    flow = Flow(hosts[0])
    wanted: Counter[str] = Counter()
    for _ in range(60):
        keys = dice.choices(KEYS, k=dice.randrange(1, 4))
        match dice.randrange(8):
            case 0:
                flow.restart(dice.choice(hosts))
            case 1:
                flow.attempt(keys, committed=False)
            case 2:
                partition = dice.randrange(PARTITIONS)
                shutil.rmtree(flow.spec.folder(partition), ignore_errors=True)
                forget(flow.spec.folder(partition))
            case 3 if flow.table.last:
                for partition, commit in flow.table.last.items():
                    settle(flow.spec.folder(partition), flow.store, commit)
            case _:
                for report in flow.attempt(keys):
                    if report.how == LOST:
                        wanted = Counter({k: n for k, n in wanted.items() if k not in in_partition(report.partition)})
                wanted.update(keys)
    reports = flow.attempt(KEYS)
    for report in reports:
        if report.how == LOST:
            wanted = Counter({k: n for k, n in wanted.items() if k not in in_partition(report.partition)})
    assert flow.counted() == wanted + Counter(KEYS)


def test_only_large_copies_are_prepared_and_nothing_is_read(tmp_path: Path) -> None:
    flow = Flow(tmp_path)
    flow.attempt(KEYS)
    moment = flow.table.moment(2, CommitId(2, 9, 9), 0)
    assert lacks(flow.spec, moment, 0) == 0
    flow.restart(tmp_path)
    moment = flow.table.moment(2, CommitId(2, 9, 9), 0)
    assert lacks(flow.spec, moment, 0) is None
    kafka: Any = NoKafka()
    flow.table.prepared([prepare_partition(flow.spec, moment, 0, kafka)])
    shutil.rmtree(flow.spec.folder(1))
    forget(flow.spec.folder(1))
    flow.table.prepared([prepare_partition(flow.spec, moment, 1, kafka)])
    assert flow.table.take_lost() == 1


def applied_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The store has the changes of a batch before the batch is committed."""

    def write(store: Store, goal: Any, commit: CommitId, changes: Any, *ends: Any, lost: bool) -> None:
        store.write(changes, index=True)

    patch.setattr(run_module, "set_pending", write)


def any_copy_will_do(patch: pytest.MonkeyPatch) -> None:
    """A copy is used whatever batch it is of."""
    patch.setattr(CommitRecord, "at", lambda record, goal: True)


@pytest.mark.parametrize("mutant", [applied_before_the_commit, any_copy_will_do])
def test_a_broken_build_is_found_out(tmp_path: Path, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    found = 0
    for seed in range(3):
        try:
            test_random_lives(tmp_path / str(seed), seed)
        except AssertionError:
            found += 1
    assert found == 3


# ---- planning ----------------------------------------------------------------------------------------


def test_the_progress_record_keeps_the_table() -> None:
    local = LocalTable("an id", 3, {0: (5, 7, 41), 2: (6, 7, 42)})
    progress = Progress("flow", 6, {}, {}, 0, tables={"t": TableProgress(2, 17, None, local)})
    key, value = records.encode(progress)
    assert records.decode(key, value) == progress
    assert without_topics("t", local).ids == {}
    with pytest.raises(ProtocolError):
        records.decode(key, value.replace(b"[5,7,41]", b"[5,7]"))


def test_a_table_keeps_its_kind_and_its_partitions() -> None:
    options = made_options()
    empty = Progress("flow", 0, {}, {}, 0)
    _, local = table_plan.plan_local_table(options, Count(), PARTITIONS, empty)
    topics = TableTopics("t", "t-internal", "a", "b", PARTITIONS, 0, 0)
    ends = {name: dict.fromkeys(range(PARTITIONS), 0) for name in topics.ids}
    with pytest.raises(ProgressConflictError, match=r"(?s)has no changelog.*changelog=False.*begins empty"):
        table_plan.check_kind(made_options(changelog=True), local)
    in_kafka = table_plan.plan_table(made_options(changelog=True), Count(), topics, ends, empty)
    with pytest.raises(ProgressConflictError, match=r"(?s)has a changelog.*changelog=True.*begins empty"):
        table_plan.check_kind(options, in_kafka)
    with pytest.raises(ProgressConflictError, match="has 2 partitions, but partitions=3"):
        table_plan.plan_local_table(made_options(partitions=3), Count(), 3, local)


@pytest.mark.parametrize(
    "given, match",
    [
        ({"store": "memory"}, "needs a store on disk"),
        ({"store": MemoryStore}, "needs a store on disk"),
        ({"adopt_existing": True}, "adopt_existing=True cannot be combined"),
        ({"changelog": "no"}, "is no bool"),
        ({"changelog": None}, "is no bool"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        process.check_options(made_options(**given), Count(), flow="flow", sources=["in"], tables=[])
