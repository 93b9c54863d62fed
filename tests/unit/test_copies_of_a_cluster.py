"""Copies of a table on the hosts of a cluster, while executors come, go and are busy. Spark is played by a fake that
runs tasks in this process, Kafka by lists; the stores are real."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from onceflow import hooks
from onceflow.client.settings import ClientSettings
from onceflow.driver.step import homes as homes_module
from onceflow.driver.step import table_homes
from onceflow.driver.step.homes import Homes, Owner
from onceflow.driver.step.table_homes import TableHomes, group_count
from onceflow.driver.step.table_state import TableState
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, OnceflowError
from onceflow.messages import MisplacedError, StateOrder, UnusableHostError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import Progress
from onceflow.spark.executors import Executor
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.local.format import CommitId
from onceflow.state.spec import ProcessSpec
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.task import preparing
from onceflow.task.state_run import StateRun
from onceflow.testing import faults

sys.path.insert(0, str(Path(__file__).parent))
try:
    from table_topics import Count, Kafka, Part
finally:
    sys.path.pop(0)

PARTITIONS = 8
KEYS = [f"key-{n}" for n in range(200)]
OWNER = Owner(ClientSettings("localhost:9092"), "flow", ProducerIdAndEpoch(9, 0))


class SlowKafka(Kafka):
    """Sends ten records at a time."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Part]:
        for low in range(start, end, 10):
            yield from super().read(topic, partition, low, min(end, low + 10))


class FakeCluster:
    """Executors, each with a state folder, and jobs that run in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executors: dict[str, Executor] = {}
        self.folders: dict[str, Path] = {}
        self.racks: dict[str, str] = {}
        self.lands: dict[str, str] = {}  # executor: where its tasks run in its place
        self.jobs: list[tuple[str, list[str]]] = []
        self._ran: dict[int, str] = {}
        self.requested = 0

    def come(self, name: str, *, host: str = "", rack: str = "", folder: str = "") -> None:
        self.executors[name] = Executor(name, host or f"host-{name}", 1)
        self.folders[name] = self.folder / (folder or f"at-{name}")
        self.racks[name] = rack

    def leave(self, name: str, *, disk: bool = False) -> None:
        del self.executors[name]
        if disk:
            shutil.rmtree(self.folders[name], ignore_errors=True)

    def decommission(self, name: str) -> None:
        known = self.executors[name]
        self.executors[name] = Executor(known.id, known.host, known.cores, leaving=True)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        before = dict(os.environ)
        os.environ |= {"ONCEFLOW_STATE_DIR": str(self.folders[name]), "ONCEFLOW_RACK": self.racks[name]}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def by_preference(self, preference: str) -> str:
        (name,) = [each.id for each in self.executors.values() if each.preference == preference] or [
            min(self.executors)
        ]
        return self.lands.get(name, name)

    # ---- as Homes sees it ----------------------------------------------------------------------------

    def ids(self) -> dict[str, bool]:
        return {name: not each.leaving for name, each in self.executors.items()}

    def of(self, ids: dict[str, bool]) -> list[Executor]:
        return [self.executors[name] for name in ids]

    def run(self, executors: Sequence[str], task: Callable[[Iterable[int]], Iterable[Any]]) -> list[Any]:
        found: list[Any] = []
        self._ran = {number: self.by_preference(name) for number, name in enumerate(executors)}
        self.jobs.append((type(task).__name__, list(self._ran.values())))
        for number, name in self._ran.items():
            with self.inside(name):
                found += task([number])
        return found

    def ran_in(self, stage: int) -> dict[int, str]:
        return self._ran

    def request_executor(self) -> None:
        self.requested += 1

    def described(self, text: str) -> None:
        pass

    has_given_up = False

    def begin(self, executors: Sequence[str]) -> None:
        pass

    def end(self) -> None:
        self.has_given_up = False

    def close(self) -> None:
        pass

    def cancel(self) -> None:
        pass


class Service:
    """A flow that counts keys, whose partitions run where they have their homes."""

    def __init__(self, cluster: FakeCluster, copies: int = 1, *, changelog: bool = True, waits: bool = True) -> None:
        self.cluster = cluster
        self.waits = waits
        topics = TableTopics("table", "table-internal", "id-t", "id-i", PARTITIONS, 86_400_000, 1_000_000)
        if not changelog:
            topics = TableTopics("table", "table-internal", "", "", PARTITIONS, 86_400_000, 1_000_000, changelog=False)
        self.spec = ProcessSpec("flow", "flow", Count(), topics, LmdbStore)
        self.kafka = SlowKafka()
        self.batch = 0
        self.counted: dict[str, int] = {}
        self.now = 1000.0
        self.copies = copies
        self.restart()

    def restart(self) -> None:
        """A driver starts, and knows what is committed."""
        ends = {
            name: {p: len(self.kafka.committed.get((name, p), [])) for p in range(PARTITIONS)}
            for name in ("table", "table-internal")
        }
        progress = Progress("flow", self.batch, {}, {}, changelogs=ends, time_ms=0, producer_id=9, producer_epoch=0)
        self.table = TableState(self.spec, progress, source_partitions=[], lateness_ms=None, idle_s=30)
        self.at = TableHomes(self.table, PARTITIONS, self.copies, self.waits)
        self.homes = Homes(
            {"table": self.at}, self.cluster, flow="flow", clock=lambda: self.now, sleep=lambda each: self.sleep(each)
        )

    def run(self, keys: Sequence[str], touched: Collection[int] | None = None) -> int:
        """A batch. Returns how many records of the table it has read within its transaction.

        Args:
            touched: the partitions that the keys belong to; None: all.
        """
        self.homes.ready(OWNER, None if touched is None else {"table": touched})
        self.batch += 1
        moment = self.table.moment(self.batch, CommitId(self.batch, 9, self.batch), 0)
        tasks = self.homes.tasks("table", touched or (), len(keys), 64)
        raw = pa.array([key.encode() for key in keys], pa.binary())
        placed = key_partitions(raw, PARTITIONS)
        reports = []
        restored = 0
        for number, executor in enumerate(tasks.executors):
            with self.cluster.inside(self.cluster.by_preference(executor)):
                location = self.spec.location()
                order: Any = StateOrder(
                    self.spec,
                    moment,
                    None,
                    "nothing",
                    None,
                    tasks.owners,
                    locations=tasks.locations,  # type: ignore[arg-type]
                )
                order.check_location(number, location)
                here = [p for p in range(PARTITIONS) if tasks.owners.task_of(p) == number]
                run = StateRun(
                    self.spec,
                    moment,
                    source=self.kafka,  # type: ignore[arg-type]
                    changelog=self.kafka,
                    emit=lambda batch, _: None,
                )
                try:
                    run.open(here)
                    mine = [i for i, p in enumerate(placed) if p in here]
                    if mine:
                        rows = pa.record_batch(
                            {"key": raw.take(pa.array(mine)), "value": pa.nulls(len(mine), pa.binary())}
                        )
                        run.feed_placed(rows, placed[mine])
                    run.finish()
                    found = run.leave_pending(self.kafka.acknowledged())
                except OnceflowError as problem:
                    raise order.of_host(problem, number) from None
                finally:
                    run.close()
            reports += found
            restored += sum(report.restored for report in found)
        self.kafka.commit()
        self.table.check(reports, moment)
        self.table.on_commit(reports, moment)
        self.homes.on_commit("table", reports)
        self.homes.ended()
        for key in keys:
            self.counted[key] = self.counted.get(key, 100) + 1
        return restored

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def slices(self, most: int = 50) -> int:
        """What runs beside the batches, until nothing is left to do. Returns how often it has worked."""
        for done in range(most):
            self.now += 4.1  # standby copies follow at least so often
            if not self.homes.slice():
                return done
        raise AssertionError("it does not come to an end")

    def stored(self) -> dict[str, int]:
        """The state as the homes have it."""
        self.run([])
        found: dict[str, int] = {}
        for partition in range(PARTITIONS):
            location = self.at.plan.homes[partition]
            (folder,) = [each for each in self.cluster.folders.values() if location.endswith(f":{each}")][:1]
            with_env = ProcessSpec("flow", "flow", Count(), self.spec.topics, LmdbStore, folder)
            store = LmdbStore.open(with_env.folder(partition))
            for key, row in store.scan(b"v", b"w"):
                found[key[1:].decode()] = int(row[row.index(b":") + 1 : row.index(b"}")])
            store.close()
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    cluster = FakeCluster(tmp_path)
    for name in "abcd":
        cluster.come(name)
    return cluster


@pytest.fixture
def service(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Service]:
    def make(**more: Any) -> Service:
        made = Service(cluster, **more)
        monkeypatch.setattr(preparing, "CommittedReader", lambda _: made.kafka)
        monkeypatch.setattr(preparing, "worker_cluster", lambda _: None)
        monkeypatch.setattr(homes_module, "_SLICE_S", 10.0)  # of real time: a slow machine does less in 0.2 s
        return made

    return make


def test_in_steady_state_nothing_is_read_and_nothing_moves(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    for _ in range(3):
        assert flow.run(KEYS) == 0
    jobs = len(cluster.jobs)
    read, moves = flow.kafka.read_records, flow.at.moves
    for _ in range(5):
        assert flow.run(KEYS) == 0
        flow.slices()
    assert (flow.kafka.read_records, flow.at.moves, len(cluster.jobs)) == (read, moves, jobs)
    assert flow.stored() == flow.counted


def test_each_host_has_its_share_of_the_table_only(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    folders = {name: len(list(folder.glob("flow/table/*"))) for name, folder in cluster.folders.items()}
    assert folders == dict.fromkeys("abcd", PARTITIONS // 4)


def test_a_new_driver_finds_the_copies_where_they_are(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    flow.run(KEYS[:50])
    before = dict(flow.at.plan.homes)
    flow.restart()
    read = flow.kafka.read_records
    assert flow.run(KEYS) == 0
    assert flow.at.plan.homes == before
    # The changes of the batch before last were pending when it was not known whether they were committed.
    assert flow.kafka.read_records - read <= len(KEYS)
    assert flow.stored() == flow.counted


def test_a_new_host_is_brought_up_beside_the_batches(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    before = dict(flow.at.plan.homes)
    cluster.come("e")
    assert flow.run(KEYS) == 0
    assert flow.at.plan.homes == before
    assert flow.slices() >= 1
    assert flow.run(KEYS) == 0
    assert any(home.endswith("at-e") for home in flow.at.plan.homes.values())
    flow.slices()
    assert len(list((cluster.folder / "at-e").glob("flow/table/*"))) == PARTITIONS // 5
    assert flow.stored() == flow.counted


def test_superfluous_copies_are_removed(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    cluster.come("e")
    for _ in range(3):
        flow.run(KEYS)
        flow.slices()
    left = [path for folder in cluster.folders.values() for path in folder.glob("flow/table/*/data.mdb")]
    assert len(left) == PARTITIONS


def test_a_lost_host_costs_its_partitions_only(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    lost = [group for group, home in flow.at.plan.homes.items() if home.endswith("at-a")]
    cluster.leave("a", disk=True)
    read = flow.kafka.read_records
    flow.now += 60
    assert flow.run(KEYS) == 0
    wanted = sum(len(flow.kafka.committed.get(("table", p), [])) for p in lost)
    assert 0 < flow.kafka.read_records - read <= wanted
    assert flow.stored() == flow.counted


def test_a_standby_copy_goes_on_without_a_restore(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    for _ in range(3):
        flow.run(KEYS)
        flow.slices()
    for name, folder in cluster.folders.items():
        assert len(list(folder.glob("flow/table/*/data.mdb"))) == 2 * PARTITIONS // 4, name
    flow.run(KEYS[:20])
    read = flow.kafka.read_records
    cluster.leave("b", disk=True)
    assert flow.run(KEYS) == 0
    assert flow.kafka.read_records - read <= 20 + PARTITIONS  # what the standby copies lacked
    flow.slices()
    assert flow.stored() == flow.counted


def test_standby_copies_of_every_table_are_kept(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    topics = TableTopics("other", "other-internal", "id-o", "id-oi", PARTITIONS, 86_400_000, 1_000_000)
    ends = {name: dict.fromkeys(range(PARTITIONS), 0) for name in topics.ids}
    progress = Progress("flow", 0, {}, {}, changelogs=ends, time_ms=0)
    spec = ProcessSpec("flow", "flow", Count(), topics, LmdbStore)
    state = TableState(spec, progress, source_partitions=[], lateness_ms=None, idle_s=30)
    tables = {"table": flow.at, "other": TableHomes(state, PARTITIONS, 2)}
    flow.homes = Homes(tables, cluster, flow="flow", clock=lambda: flow.now)
    for _ in range(3):
        flow.run(KEYS)
        for partition in range(PARTITIONS):
            flow.kafka.committed.setdefault(("other", partition), []).extend([(b"k", b"{}"), None])
            state._table_ends[partition] += 2
        flow.now += 4.1
        assert flow.homes.slice()
        facts = [flow.homes.facts(name) for name in tables]
        assert [each.standby_lacking for each in facts] == [0, 0]
    assert [each.standby for each in facts] == [PARTITIONS, PARTITIONS]


def test_a_standby_copy_is_read_in_the_pauses_only(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    flow.run(KEYS)
    flow.slices()
    flow.run(KEYS)
    flow.homes.ready(OWNER)  # a batch begins
    flow.now += 1.5
    jobs = len(cluster.jobs)
    assert not flow.homes.slice()
    assert len(cluster.jobs) == jobs
    flow.now += 1.0  # it takes long: copies may not fall behind for ever
    assert flow.homes.slice()
    flow.homes.ended()


def test_standby_copies_of_an_earlier_driver_are_verified_beside_the_batches(service: Any) -> None:
    """They lack nothing. But whoever takes over would verify them while records wait."""
    flow = service(copies=2)
    flow.run(KEYS)
    flow.slices()
    flow.restart()
    flow.run([])
    flow.slices()
    kept = [(group, at) for group, locations in flow.at.plan.standbys.items() for at in locations]
    assert len(kept) == PARTITIONS
    assert all(flow.table.is_verified(partition, at) for group, at in kept for partition in flow.at.partitions(group))


@pytest.mark.parametrize("lacks_max, after_s", [(10**6, 4.0), (5, 1.0)], ids=["few", "many"])
def test_standby_copies_that_lack_much_are_read_sooner(
    service: Any, monkeypatch: pytest.MonkeyPatch, lacks_max: int, after_s: float
) -> None:
    monkeypatch.setattr(homes_module, "_STANDBY_LACKS_MAX", lacks_max)
    flow = service(copies=2)
    flow.run(KEYS)
    flow.slices()
    flow.run(KEYS)
    assert flow.homes.slice()
    begin = flow.now
    flow.run(KEYS)
    while flow.homes.facts("table").standby_lacking:
        assert not flow.homes.slice() or flow.homes.facts("table").standby_lacking == 0
        flow.now += 0.25
    assert after_s <= flow.now - begin <= after_s + 1.0


@pytest.mark.parametrize("copies", [1, 2])
def test_a_host_that_leaves_in_order_is_not_waited_for(service: Any, cluster: FakeCluster, copies: int) -> None:
    """Spark gives no more tasks to an executor that it decommissions."""
    flow = service(copies=copies)
    for _ in range(3):
        flow.run(KEYS)
        flow.slices()
    read, began = flow.kafka.read_records, flow.now
    cluster.decommission("c")
    assert flow.run(KEYS) == 0
    assert flow.now == began
    assert not any(home.endswith("at-c") for home in flow.at.plan.homes.values())
    assert copies == 1 or flow.kafka.read_records == read
    cluster.leave("c", disk=True)
    flow.slices()
    assert flow.run(KEYS) == 0
    assert flow.stored() == flow.counted


def test_an_executor_that_is_replaced_keeps_its_copies(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    before, read = dict(flow.at.plan.homes), flow.kafka.read_records
    cluster.leave("d")
    cluster.come("d2", host="host-d", folder="at-d")
    assert flow.run(KEYS) == 0
    assert flow.at.plan.homes == before
    assert flow.kafka.read_records == read
    assert flow.stored() == flow.counted


def test_an_executor_that_is_replaced_soon_costs_no_new_copies(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    for _ in range(20):
        flow.run(KEYS)
        flow.slices()
    before, standbys = dict(flow.at.plan.homes), dict(flow.at.plan.standbys)
    everything = sum(map(sum, flow.table.committed().values()))
    read = flow.kafka.read_records
    cluster.leave("d")
    flow.run(KEYS)
    assert not any(home.endswith("at-d") for home in flow.at.plan.homes.values())
    flow.slices()
    cluster.come("d2", host="host-d", folder="at-d")
    for _ in range(2):
        flow.run(KEYS)
        flow.slices()
    assert (flow.at.plan.homes, flow.at.plan.standbys) == (before, standbys)
    # What the other copies have missed, but no copy from its beginning.
    assert flow.kafka.read_records - read < everything / 4
    assert flow.stored() == flow.counted


def test_the_driver_waits_for_a_host_as_long_as_a_restore_would_take(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes_module, "_RESTORED_PER_S", 1)  # a restore would take long
    flow = service()
    flow.run(KEYS)
    before, read = dict(flow.at.plan.homes), flow.kafka.read_records
    cluster.leave("d")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        flow.now += seconds
        if len(waited) == 20:
            cluster.come("d2", host="host-d", folder="at-d")

    flow.sleep = sleep
    assert flow.run(KEYS) == 0
    assert 0 < sum(waited) < 10
    assert (flow.at.plan.homes, flow.kafka.read_records) == (before, read)
    cluster.leave("d2", disk=True)  # for good
    began = flow.now
    assert flow.run(KEYS) == 0
    assert flow.now - began == pytest.approx(10, abs=1)
    assert flow.stored() == flow.counted


def test_a_start_waits_for_the_executors_that_have_the_copies(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    for _ in range(60):  # a restore would take a while
        flow.run(KEYS)
    for name in "bcd":
        cluster.leave(name)
    flow.restart()
    coming = iter("bcd")
    sleep = flow.sleep

    def sleep_and_come(seconds: float) -> None:
        sleep(seconds)
        if (name := next(coming, "")) != "":
            cluster.come(name)

    flow.sleep = sleep_and_come
    began, read = flow.now, flow.kafka.read_records
    assert flow.run(KEYS) == 0
    assert 0 < flow.now - began < 3
    assert flow.kafka.read_records - read <= 2 * len(KEYS)
    assert flow.stored() == flow.counted


def test_a_start_without_executors_says_what_it_waits_for_and_ends(
    service: Any, cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = service()
    for name in "abcd":
        cluster.leave(name)
    with caplog.at_level(logging.INFO), pytest.raises(BatchAbortedError, match="has no executor 60 s after flow flow"):
        there.run(["k"])
    said = [each for each in caplog.records if "first executor" in each.getMessage()]
    assert said[0].getMessage().endswith("(0 s)")
    # Without a logging configuration, Python shows warnings only.
    assert [each.levelno for each in said] == [logging.INFO, *[logging.WARNING] * 5]
    assert cluster.requested

    monkeypatch.setattr(there, "sleep", lambda _: cluster.come("e"))  # while the next attempt waits
    there.run(["k"])
    assert there.counted["k"] == 101


def test_a_task_elsewhere_fails_the_attempt_and_its_host_is_avoided_in_the_end(
    service: Any, cluster: FakeCluster
) -> None:
    flow = service()
    flow.run(KEYS)
    cluster.lands["a"] = "b"
    for attempt in range(homes_module._MISSES):
        with pytest.raises(MisplacedError) as caught:
            flow.run(KEYS)
        flow.kafka.open = {}
        assert flow.homes.failed(caught.value), attempt
    # The copies of the host are avoided now: they are restored elsewhere.
    for _ in range(3):
        flow.slices()
        try:
            assert flow.run(KEYS) == 0
            break
        except MisplacedError as error:
            flow.kafka.open = {}
            flow.homes.failed(error)
    assert not any(home.endswith("at-a") for home in flow.at.plan.homes.values())
    assert not flow.homes.failed(BatchAbortedError("another one"))
    cluster.lands.clear()
    assert flow.stored() == flow.counted


def spoil(folder: Path) -> None:
    """Nobody can use it as a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.touch()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_host_whose_disk_fails_is_avoided(
    service: Any, cluster: FakeCluster, copies: int, caplog: pytest.LogCaptureFixture
) -> None:
    flow = service(copies=copies)
    flow.run(KEYS)
    flow.slices()
    spoil(cluster.folders["a"])
    with pytest.raises(UnusableHostError) as caught:
        flow.run(KEYS)
    flow.kafka.open = {}
    assert flow.homes.failed(caught.value)
    assert flow.run(KEYS) == 0
    assert "partitions have no home at" in caplog.text
    assert not any(home.endswith("at-a") for home in flow.at.plan.homes.values())
    flow.slices()
    flow.now += 70.0  # it is tried again
    flow.slices()
    flow.run(KEYS)
    assert not any(home.endswith("at-a") for home in flow.at.plan.homes.values())
    cluster.folders["a"].unlink()
    flow.now += 70.0
    for _ in range(2):
        flow.run(KEYS)
        flow.slices()
    assert any(home.endswith("at-a") for home in flow.at.plan.homes.values())
    assert flow.stored() == flow.counted


def test_a_host_whose_disk_cannot_be_used_at_the_start_is_avoided(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    flow.restart()
    spoil(cluster.folders["a"])
    assert flow.run(KEYS) == 0
    assert not any(home.endswith("at-a") for home in flow.at.plan.homes.values())
    assert flow.stored() == flow.counted


def test_without_any_host_that_can_be_used_the_error_is_that_of_a_disk(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    for folder in cluster.folders.values():
        spoil(folder)
    found: list[BaseException] = []
    while not any(isinstance(each, EnvironmentUnusableError) for each in found):
        assert len(found) < 10
        try:
            flow.run(KEYS)
        except UnusableHostError as error:
            flow.kafka.open = {}
            found.append(error)
            try:
                flow.homes.failed(error)
            except EnvironmentUnusableError as last:
                found.append(last)
        except EnvironmentUnusableError as last:
            found.append(last)
    assert "The local state cannot be opened" in str(found[-1])
    assert "; at " not in str(found[-1])


def test_a_slow_restore_is_continued_in_slices(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes_module, "_LONG_SLICE_S", 0.0)
    monkeypatch.setattr(table_homes, "ACCEPTABLE_LAG", 0)
    flow = service()
    for _ in range(5):
        flow.run(KEYS)
    cluster.come("e")
    flow.run(KEYS)
    (new,) = {at for _, at in flow.at.plan.restores}
    reached = []
    for _ in range(3):
        assert flow.homes.slice()
        reached.append(sum(sum(ends) for (_, at), ends in flow.at._ends.items() if at == new))
    assert 0 < reached[0] < reached[1] < reached[2]
    flow.slices(most=500)
    flow.run(KEYS)
    assert any(home.endswith("at-e") for home in flow.at.plan.homes.values())
    assert flow.stored() == flow.counted


def test_a_copy_that_cannot_be_read_stops_the_batch_and_not_what_runs_beside(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = service()
    flow.run(KEYS)
    refused = OnceflowError("the disk is full")
    cluster.leave("a", disk=True)
    flow.now += 60

    class Refused:
        def read_columns(self, *_: object, **__: object) -> Iterator[Any]:
            raise refused
            yield

    monkeypatch.setattr(preparing, "CommittedReader", lambda _: Refused())
    with pytest.raises(OnceflowError, match="the disk is full"):
        flow.run(KEYS)
    flow.homes.failed(refused)
    with pytest.raises(OnceflowError, match="the disk is full"):
        flow.homes.slice()
    monkeypatch.setattr(preparing, "CommittedReader", lambda _: flow.kafka)
    assert flow.run(KEYS) == 0
    assert flow.stored() == flow.counted


def test_partitions_that_are_ready_go_on_while_others_are_restored(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_homes, "ACCEPTABLE_LAG", 0)
    flow = service(waits=False)
    assert flow.homes.waiting("table") == set()  # nobody owns the flow yet
    flow.run(KEYS)
    lost = {group for group, home in flow.at.plan.homes.items() if home.endswith("at-a")}
    cluster.leave("a", disk=True)
    assert flow.homes.waiting("table") == lost
    ready = set(range(PARTITIONS)) - lost
    placed = key_partitions(pa.array([key.encode() for key in KEYS], pa.binary()), PARTITIONS)
    before, read = flow.now, flow.kafka.read_records
    for _ in range(3):
        assert flow.run([key for key, p in zip(KEYS, placed, strict=True) if p in ready], ready) == 0
    assert (flow.now, flow.kafka.read_records) == (before, read), "nobody waits, nothing is restored in a batch"
    flow.slices()
    assert flow.homes.waiting("table") == set()
    assert flow.run(KEYS) == 0


def test_a_job_that_waits_for_an_executor_that_is_gone_is_planned_again(service: Any, cluster: FakeCluster) -> None:
    flow = service()
    flow.run(KEYS)
    cancelled = PySparkException("Job 7 cancelled")
    with pytest.raises(PySparkException, match="Job 7"), flow.homes.placed():  # somebody stops the query
        raise cancelled
    for _ in range(homes_module._MISSES + 1):
        cluster.has_given_up = True
        with pytest.raises(MisplacedError) as caught, flow.homes.placed():
            raise cancelled
        assert flow.homes.failed(caught.value)
        assert not cluster.has_given_up
    before = dict(flow.at.plan.homes)
    assert flow.run(KEYS) == 0
    assert flow.at.plan.homes == before, "no host is avoided for it"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_restore_that_dies_is_continued(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Records were read, and nobody has written them into the copy."""
    flow = service(copies=copies)
    flow.run(KEYS)
    flow.slices()
    cluster.leave("a", disk=True)
    flow.homes.waiting("table")  # looks
    flow.now += 60  # it is not waited for any longer
    monkeypatch.setenv(hooks.VARIABLE, faults.fault(hooks.RESTORE, "raise", where="task", flow="flow"))
    faults._fired.clear()
    restores: Callable[[], int] = (lambda: flow.run(KEYS)) if copies == 1 else flow.slices
    with pytest.raises(faults.InjectedFaultError):  # Spark would run the task again, and then raise an error of its own
        restores()
    assert flow.run(KEYS) == 0
    flow.slices()
    facts = flow.homes.facts("table")
    assert (facts.waiting, facts.lacking, facts.standby) == (0, 0, PARTITIONS * (copies - 1))
    assert flow.stored() == flow.counted


def test_state_without_a_changelog_does_not_move(service: Any, cluster: FakeCluster) -> None:
    flow = service(changelog=False)
    for _ in range(2):
        flow.run(KEYS)
    before = dict(flow.at.plan.homes)
    cluster.come("e")
    for _ in range(3):
        flow.run(KEYS)
        flow.slices()
    assert flow.at.plan.homes == before
    assert flow.table.take_lost() == 0


def test_what_is_said_of_the_copies(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    flow.run(KEYS)
    before = flow.homes.facts("table")
    assert (before.hosts, before.waiting, before.lacking, before.moved) == (4, 0, 0, 0)
    assert before.standby_lacking == sum(map(sum, flow.table.committed().values()))
    flow.slices()
    after = flow.homes.facts("table")
    assert (after.standby, after.standby_lacking) == (PARTITIONS, 0)
    for name in "ab":
        cluster.leave(name, disk=True)
    flow.slices()
    lost = flow.homes.facts("table")
    assert (lost.hosts, lost.lacking, lost.waiting) == (2, 0, 0)
    assert lost.moved >= PARTITIONS // 2


def test_a_restore_that_batches_wait_for_shows_how_far_it_is(
    service: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onceflow.state")
    flow = service()
    flow.run(KEYS)
    monkeypatch.setattr(homes_module, "_LONG_SLICE_S", 0.0)  # it ends after each partition, or a part of it
    for name in "ab":
        cluster.leave(name, disk=True)
    shown = []
    run = cluster.run

    def seen(*job: Any) -> list[Any]:
        found = run(*job)
        shown.append(flow.homes.facts("table"))
        flow.now += 4.0
        return found

    monkeypatch.setattr(cluster, "run", seen)
    assert flow.run(KEYS) == 0
    lacking = [each.lacking for each in shown]
    assert len(lacking) > 3
    assert lacking == sorted(lacking, reverse=True)
    assert flow.homes.facts("table").lacking == 0
    assert max(each.restored_per_s for each in shown) > 0
    told = [each.message for each in caplog.records if "are read a second" in each.message]
    assert 2 <= len(told) < len(lacking), "it is told every ten seconds"
    flow.now += 60.0
    assert flow.homes.facts("table").restored_per_s == 0
    assert flow.stored() == flow.counted


def test_standby_copies_without_a_place_are_told_and_lack_everything(
    service: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several state folders on one machine, as Spark names it, are no protection."""
    cluster = FakeCluster(tmp_path / "one")
    cluster.come("a", host="same")
    cluster.come("b", host="same")
    flow = service(copies=2)
    flow.cluster = cluster
    flow.restart()
    flow.run(KEYS)
    flow.slices()
    facts = flow.homes.facts("table")
    everything = sum(map(sum, flow.table.committed().values()))
    assert (facts.hosts, facts.standby, facts.standby_lacking) == (2, 0, everything)
    assert "have no place" not in caplog.text, "others may come"
    for _ in range(3):
        flow.now += 31.0
        flow.run(KEYS)
    assert caplog.text.count("8 standby copies have no place") == 1
    assert "executors on same only" in caplog.text
    cluster.come("c", host="other")
    flow.run(KEYS)
    flow.slices()
    facts = flow.homes.facts("table")
    assert (facts.standby, facts.standby_lacking) == (PARTITIONS, 0)


def test_what_standby_copies_read_is_no_restore(service: Any, cluster: FakeCluster) -> None:
    flow = service(copies=2)
    for _ in range(3):
        flow.run(KEYS)
        flow.slices()
        assert flow.homes.facts("table").restored_per_s == 0


@pytest.mark.parametrize(
    "partitions, sources, outputs, hosts, groups",
    [
        (16, [16], [16], 4, 16),
        (16, [16], [8], 4, 8),
        (16, [16], [4], 4, 16),  # four groups are too few for four hosts
        (16, [6], [16], 4, 16),  # not co-partitioned
        (1000, [1000], [1000], 8, 1000),
        (7, [7], [], 2, 7),
        (1, [1], [1], 8, 1),
    ],
)
def test_groups_suit_sources_and_outputs_if_there_are_enough(
    partitions: int, sources: list[int], outputs: list[int], hosts: int, groups: int
) -> None:
    assert group_count(partitions, sources, outputs, hosts) == groups
