"""Homes of table partitions on a cluster: tasks run where the local copies are, and copies are restored beside batches.

Spark runs a task anywhere. So the driver knows the executors and the copies that they have, gives each partition a home
(``planning/homes.py``), and names the executors in its jobs. Before a batch begins, all homes are brought up to what is
committed. Standby copies, and copies that will be homes, follow in between: hosts that have homes do it in the time
between batches, others at any time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from onceflow import hooks
from onceflow.client.settings import ClientSettings
from onceflow.driver.batch.errors import in_short
from onceflow.driver.step.table_homes import StateExecutors, TableHomes
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, OnceflowError, counted
from onceflow.messages import MisplacedError, PrepareOrder, UnusableHostError
from onceflow.planning.homes import StateHost
from onceflow.planning.placement import HomeTasks
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.spark.executors import Executor
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.state.local.format import CommitId
from onceflow.state.spec import StateReport
from onceflow.state.table_facts import CopyFacts
from onceflow.task.copy_tasks import CopiesFound, CopyOrder, CopyReport, CopyTask, LookTask

log = logging.getLogger("onceflow.state")

_T = TypeVar("_T")

_LOOK_EVERY_S = 0.5
_TURN_S = 0.05
# A host that is gone is waited for as long as a restore elsewhere would take, at this rate, and no longer than this: an
# executor that was killed is replaced in seconds, on the same host with the same copies.
_AWAITED_S, _RESTORED_PER_S = 10.0, 100_000
# At a start, executors register one after the other: so long after the last one, another one is waited for.
_COMING_S = 3.0
# How long copies are brought up at a time: where batches run, the next one may wait for it.
_SLICE_S, _LONG_SLICE_S = 0.2, 5.0
# Standby copies follow so often. Each time, all their stores are opened: so only as often as is needed for them to lack
# less than a fraction of a second takes to read.
_STANDBY_EVERY_S, _STANDBY_AT_LEAST_EVERY_S, _STANDBY_LACKS_MAX = 1.0, 4.0, 20_000
_STARVED_S = 2.0  # batches without a pause: then copies get a slice beside them
# Tasks that run elsewhere, one after the other, until their host is avoided for a time.
_MISSES, _AVOIDED_S = 10, 60.0
_MISSED_MAX = 50  # in one batch; what exceeds it counts as failed attempts
_START_S = 60.0  # for the first executor
_TELL_EVERY_S, _UNPLACED_S = 10.0, 30.0


class Cluster(Protocol):
    """The executors, and jobs in them (`Executors`, `PlacedJobs`)."""

    def ids(self) -> dict[str, bool]:
        """The registered executors, and whether each takes new tasks."""
        ...

    def of(self, ids: dict[str, bool]) -> list[Executor]:
        """What is known of these executors."""
        ...

    def run(self, executors: Sequence[str], task: Callable[[Iterable[int]], Iterable[_T]]) -> list[_T]:
        """Run a function once for each of these executors."""
        ...

    def ran_in(self, stage: int) -> dict[int, str]:
        """In which executor each task of a stage has run."""
        ...

    def request_executor(self) -> None:
        """Have Spark start an executor, without waiting for it."""
        ...

    def described(self, text: str) -> None:
        """Say what the jobs of this thread are for."""
        ...

    def begin(self, executors: Sequence[str]) -> None:
        """A job of a batch, in this thread, will have a task for each of these executors."""
        ...

    @property
    def has_given_up(self) -> bool:
        """Whether that job was cancelled, because a task has waited for an executor that is gone."""
        ...

    def end(self) -> None:
        """It is over."""
        ...

    def close(self) -> None:
        """Watch jobs no longer."""
        ...

    def cancel(self) -> None:
        """Cancel the jobs of other threads that `described` their jobs."""
        ...


@dataclass(frozen=True)
class Owner:
    """Who owns the flow, for tasks that bring up copies.

    Args:
        settings: how they connect.
        transactional_id, producer: of the flow.
    """

    settings: ClientSettings
    transactional_id: str
    producer: ProducerIdAndEpoch


class Homes:
    """The homes of all tables of one query.

    Args:
        tables: by their names.
        cluster: the executors.
        clock: monotonic seconds.
        sleep: waits for so many of them.
    """

    def __init__(
        self,
        tables: Mapping[str, TableHomes],
        cluster: Cluster,
        *,
        flow: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.tables = dict(tables)
        self._cluster = cluster
        self._flow = flow
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.RLock()
        self._copying = threading.Condition()
        self._in_use: set[str] = set()  # locations where a job brings copies up now
        self._ids: dict[str, bool] = {}
        self._executors: dict[str, Executor] = {}
        self._found: dict[str, CopiesFound] = {}  # by executor: where it keeps its copies
        self._come_at = clock()  # when the last one has come
        self._asked: set[str] = set()  # executors that are being asked for them
        self._asker: ThreadPoolExecutor | None = None
        self._seen: dict[str, Mapping[str, StateHost]] = {}  # by table: the hosts of the last look
        # By table and location: hosts that have lost their executors, and when.
        self._away: dict[tuple[str, str], tuple[StateHost, float]] = {}
        self._avoided: dict[str, float] = {}  # location: until when
        self._unplaced_since: dict[str, float] = {}  # by table: since when standby copies have no place
        self._misses = self._missed = 0  # since the last commit: of one host, and of all
        self._owner: Owner | None = None
        self._busy_since: float | None = None
        self._slice_at = self._standby_at = float("-inf")
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start what runs beside the batches, unless it runs."""
        if self._thread is None:
            about = f"flow {self._flow}, executors are asked for their local copies"
            self._asker = ThreadPoolExecutor(
                1, f"executors of {self._flow}", initializer=self._cluster.described, initargs=(about,)
            )
            self._thread = threading.Thread(target=self._beside, name=f"copies of {self._flow}", daemon=True)
            self._thread.start()

    # ---- batches -------------------------------------------------------------------------------------

    def waiting(self, table: str) -> frozenset[int]:
        """The groups of a table that are being restored, so that the next batch leaves them out. None are left out
        before the first batch."""
        if self._owner is None:
            return frozenset()
        self._look()
        with self._lock:
            at = self.tables[table]
            before = at.plan.waiting
            at.assign(self._hosts(table))
            waiting = at.plan.waiting if at.is_restored else frozenset()
        if waiting and waiting != before:
            log.warning(
                "flow %s: partitions of table %s are being restored, and the records of their keys wait: %s",
                *(self._flow, table, ", ".join(str(p) for group in sorted(waiting) for p in at.partitions(group))),
            )
            self._wake.set()
        return waiting

    def ready(self, owner: Owner, touched: Mapping[str, Collection[int]] | None = None) -> None:
        """Bring homes up to what is committed. Call this before the transaction of an attempt begins.

        Args:
            touched: by table, the groups that the batch needs; a table that is missing, or None: all of them.

        Raises:
            OnceflowError: a copy could not be brought up, or Spark has no executors.
        """
        self._owner = owner
        self._busy_since = self._clock()
        self._look()
        self._await_executors()
        touched = touched or {}
        self._await_hosts([table for name, table in self.tables.items() if name not in touched])
        with self._lock:
            for table in self.tables.values():
                table.assign(self._hosts(table.name))
                self._tell_unplaced(table)
        for name, table in self.tables.items():
            self._bring_up(table, touched.get(name, range(table.groups)))

    def tasks(self, table: str, touched: Collection[int], rows: int, cores: int) -> HomeTasks:
        """See `TableHomes.tasks`."""
        with self._lock:
            found = self.tables[table].tasks(self._of_table(table), touched, rows, cores)
        self._cluster.begin(found.executors)
        return found

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """The tasks of a batch run in here.

        Raises:
            MisplacedError: an executor is gone that one of them has waited for.
        """
        try:
            yield
        except SPARK_ERRORS as error:
            if not self._cluster.has_given_up:
                raise
            raise MisplacedError(
                "An executor is gone before a task has begun whose local copies it has",
                flow=self._flow,
                next_step="none: the batch is planned again",
            ) from error

    def facts(self, table: str) -> CopyFacts:
        """Where the copies of a table are now. It may be called in any thread."""
        with self._lock:
            return self.tables[table].facts(self._clock())

    def on_commit(self, table: str, reports: Iterable[StateReport]) -> None:
        """A batch is committed, with these reports about a table."""
        with self._lock:
            self.tables[table].on_commit((report.partition, report.location) for report in reports)
            self._misses = self._missed = 0

    def ended(self) -> None:
        """The attempt of a batch is over."""
        self._busy_since = None
        self._cluster.end()
        self._wake.set()

    def failed(self, problem: BaseException) -> bool:
        """An attempt has failed. Returns whether it is not counted: a task was not where its copies are, or its host is
        avoided from now on.

        Raises:
            EnvironmentUnusableError: a host cannot be used, and there is no other one.
        """
        self.ended()
        self._ids = {}  # look again, whatever was known
        if not isinstance(problem, MisplacedError):
            return False
        if isinstance(problem, UnusableHostError) and not self._avoids(problem.location, problem.problem()):
            raise problem.problem()
        self._misses += bool(problem.wanted)
        self._missed += 1
        if self._misses >= _MISSES:
            log.warning(
                "flow %s: Spark has run tasks %d times elsewhere than at %s, where their local copies are; for the "
                "next %.0f s their partitions have other homes. Its executors may be busy with other jobs: raise "
                "spark.locality.wait.process",
                *(self._flow, self._misses, problem.wanted, _AVOIDED_S),
            )
            self._avoided[problem.wanted] = self._clock() + _AVOIDED_S
            self._misses = 0
        return self._missed <= _MISSED_MAX

    def _avoids(self, location: str, problem: OnceflowError) -> bool:
        """A host cannot be used, for want of space, say: its partitions get other homes for a time. Returns False if
        there is no other host."""
        with self._lock:
            if any(self._of_table(name).hosts.keys() <= {location} for name in self.tables):
                return False
            self._avoided[location] = self._clock() + _AVOIDED_S
            for table in self.tables.values():
                table.found(location, {})
            self._ids = {}
        log.warning(
            "flow %s: for the next %.0f s, partitions have no home at %s: %s",
            *(self._flow, _AVOIDED_S, location, in_short(problem)),
        )
        return True

    def close(self) -> None:
        """End what runs beside the batches."""
        self._closed = True
        self._wake.set()
        self._cluster.close()
        self._cluster.cancel()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        if self._asker is not None:
            self._asker.shutdown(wait=False, cancel_futures=True)

    # ---- executors -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """See which executors there are. New ones are asked for their copies.

        That takes some seconds in a new executor, whose Python has yet to start. So it is done beside the batches,
        unless there is nothing else that could run them.
        """
        with self._lock:
            ids = self._cluster.ids()
            if ids == self._ids:
                return
            self._ids = ids
            executors = {each.id: each for each in self._cluster.of(ids)}
            if len(executors) < len(ids):
                self._ids = {}  # Spark does not know all of them yet
            self._executors = executors
            self._found = {name: found for name, found in self._found.items() if name in executors}
            new = [each for name, each in sorted(executors.items()) if name not in self._found and not each.leaving]
            new = [each for each in new if each.id not in self._asked]
            self._note_gone()
            self._asked |= {each.id for each in new}
        if not new:
            return
        if self._asker is not None and self._found:
            self._asker.submit(self._ask, new)
        else:
            self._ask(new)

    def _ask(self, executors: Sequence[Executor]) -> None:
        try:
            if self._owner is not None:
                with self._lock:
                    orders = tuple(self._order(table) for table in self.tables.values())
                    known = frozenset(at for name in self.tables for at in self._of_table(name).hosts)
                answers = self._cluster.run([each.preference for each in executors], LookTask(orders, known))
                ran_in = {stage: self._cluster.ran_in(stage) for stage in {answer.stage for answer in answers}}
                self._note_found(executors, answers, ran_in)
        except SPARK_ERRORS as error:  # one of them has just left, say: the next look finds out
            if not self._closed:
                log.info("flow %s: executors could not be asked for their local copies: %s", self._flow, error)
        finally:
            with self._lock:
                self._asked -= {each.id for each in executors}
                if not all(each.id in self._found for each in executors):
                    self._ids = {}
            self._wake.set()

    def _note_found(
        self, executors: Sequence[Executor], answers: Iterable[CopiesFound], ran_in: Mapping[int, Mapping[int, str]]
    ) -> None:
        wanted = {each.id for each in executors}
        with self._lock:
            for answer in answers:
                executor = ran_in[answer.stage].get(answer.task, "")
                if executor not in wanted or executor in self._found:
                    continue  # Spark has run the task in another one
                self._found[executor] = answer
                self._come_at = self._clock()
                for name, copies in answer.copies.items():
                    self.tables[name].found(answer.locations[name], copies)
            self._note_gone()

    def _note_gone(self) -> None:
        now = self._clock()
        for name in self.tables:
            there = self._of_table(name).hosts
            for location, host in self._seen.get(name, {}).items():
                if location not in there and not self._has_left(name, location):
                    self._away[name, location] = replace(host, away=True), now
                    log.warning("flow %s: table %s: no executor is left at %s", self._flow, name, location)
            for location in there:
                self._away.pop((name, location), None)
            self._seen[name] = there

    def _has_left(self, table: str, location: str) -> bool:
        """Whether a host without usable executors need not be waited for: they leave in order, or are avoided."""
        there = [name for name, found in self._found.items() if found.locations[table] == location]
        return any(name in self._executors for name in there)

    def _of_table(self, table: str) -> StateExecutors:
        """The executors, by the place where they keep the copies of a table."""
        by_location: dict[str, list[Executor]] = {}
        racks: dict[str, str] = {}
        for name, found in self._found.items():
            location, executor = found.locations[table], self._executors.get(name)
            # Spark gives no more tasks to an executor that it decommissions (CoarseGrainedSchedulerBackend.makeOffers).
            usable = executor is not None and not executor.leaving
            if executor is not None and usable and self._clock() >= self._avoided.get(location, 0.0):
                by_location.setdefault(location, []).append(executor)
                racks[location] = found.rack
        hosts = {
            location: StateHost(location, there[0].host, racks[location], sum(each.cores for each in there))
            for location, there in by_location.items()
        }
        names = {location: [(each.preference, each.cores) for each in there] for location, there in by_location.items()}
        return StateExecutors(hosts, names)

    def _hosts(self, table: str) -> list[StateHost]:
        """The hosts for a table, also those that may come back in a moment."""
        now = self._clock()
        away = [host for (name, _), (host, at) in self._away.items() if name == table and now - at < _AWAITED_S]
        return [*self._of_table(table).hosts.values(), *away]

    def _await_executors(self) -> None:
        """Without executors there is no home. They may not have registered yet, or have been idle for too long."""
        since = self._clock()
        told_at = since - _TELL_EVERY_S
        while not any(self._of_table(name).hosts for name in self.tables):
            waited_s = self._clock() - since
            if waited_s > _START_S:
                raise BatchAbortedError(
                    f"Spark has no executor {_START_S:.0f} s after flow {self._flow} has asked for one",
                    flow=self._flow,
                    next_step="look at the master's and the workers' logs, and whether other applications have all "
                    "cores; the flow continues when there is an executor",
                )
            if self._clock() - told_at >= _TELL_EVERY_S:
                told_at = self._clock()
                level = logging.WARNING if waited_s >= _TELL_EVERY_S else logging.INFO
                log.log(level, "flow %s waits for the first executor of Spark (%.0f s)", self._flow, waited_s)
            self._cluster.request_executor()
            self._sleep(_TURN_S)
            self._look()

    def _await_hosts(self, tables: Collection[TableHomes]) -> None:
        """Wait for hosts that are gone, or at a start have not come yet, as long as a restore of what only they can
        have would take."""
        while (wait_s := self._wait_s(tables)) > 0 and not self._closed:
            self._sleep(min(_TURN_S, wait_s))
            self._look()

    def _wait_s(self, tables: Collection[TableHomes]) -> float:
        with self._lock:
            longest = 0.0
            for table in tables:
                there = self._of_table(table.name).hosts
                gone, records = table.orphans(there.keys())
                rate = _RESTORED_PER_S * max(1, sum(host.cores for host in there.values()))
                patience = min(_AWAITED_S, records / rate)
                for location in gone:
                    since, wait_s = self._come_at, min(_COMING_S, patience)
                    if (table.name, location) in self._away:
                        since, wait_s = self._away[table.name, location][1], patience
                    elif location:
                        continue  # it had time enough
                    longest = max(longest, since + wait_s - self._clock())
            return longest

    # ---- copies --------------------------------------------------------------------------------------

    def _bring_up(self, table: TableHomes, groups: Collection[int]) -> None:
        """Bring the homes of groups of a table up to what is committed, however long that takes. After each slice, what
        is still lacking is known."""
        if not table.is_restored:
            return
        tried, told_at = 0, self._clock() - _TELL_EVERY_S
        while lacking := table.missing(table.homes_of(groups)):
            waiting = table.plan.waiting & {*groups}
            if waiting and self._clock() - told_at >= _TELL_EVERY_S:
                told_at = self._clock()
                self._tell_waiting(table, len(waiting))
            tried = 0 if self._run_copies(table, lacking, _LONG_SLICE_S, waits=True) else tried + 1
            if tried > _MISSES or self._closed:
                raise BatchAbortedError(
                    f"Local copies of table {table.name} cannot be brought up where they are needed",
                    flow=self._flow,
                    topic=table.name,
                    next_step="Spark runs the tasks elsewhere: see spark.locality.wait in docs/deploy.md",
                )
            if table.missing(table.homes_of(groups)):
                self._ids = {}
                self._look()
                with self._lock:
                    table.assign(self._hosts(table.name))

    def _tell_unplaced(self, table: TableHomes) -> None:
        """Warn when standby copies have had no place for some time. At a start, executors come one after the other."""
        if not table.unplaced:
            self._unplaced_since.pop(table.name, None)
            return
        since = self._unplaced_since.setdefault(table.name, self._clock())
        if self._clock() - since >= _UNPLACED_S:
            self._unplaced_since[table.name] = float("inf")  # once
            machines = sorted({host.host for host in self._of_table(table.name).hosts.values()})
            log.warning(
                "flow %s: table %s: %d standby copies have no place. They are kept on other machines than the homes, "
                "and Spark has executors on %s only. Add machines, or leave copies= out",
                *(self._flow, table.name, table.unplaced, ", ".join(machines)),
            )

    def _tell_waiting(self, table: TableHomes, waiting: int) -> None:
        with self._lock:
            facts = table.facts(self._clock())
        log.info(
            "flow %s: table %s waits until %s of %d are restored: %d records are left, %d are read a second",
            *(self._flow, table.name, counted(waiting, "group"), table.groups, facts.lacking, facts.restored_per_s),
        )

    def _run_copies(
        self,
        table: TableHomes,
        lacking: Mapping[str, Sequence[int]],
        limit_s: float,
        surplus: Mapping[str, Sequence[int]] | None = None,
        *,
        waits: bool = False,
    ) -> bool:
        """Bring copies up, by location, and remove others. Returns whether anything was done.

        Args:
            limit_s: how long it may take; what is not done then is left.
            waits: until nothing else brings up copies there; else what is in use is left out.

        Raises:
            OnceflowError: a copy could not be brought up.
        """
        names = self._of_table(table.name).names
        surplus = surplus or {}
        with self._using({*lacking, *surplus} & names.keys(), waits=waits) as free:
            return self._run_at(table, names, free, lacking, surplus, limit_s, beside=not waits)

    @contextlib.contextmanager
    def _using(self, locations: set[str], *, waits: bool) -> Iterator[set[str]]:
        """Locations where nothing else brings up copies meanwhile. ``waits``: until that is so everywhere."""
        with self._copying:
            while waits and locations & self._in_use:
                self._copying.wait(_TURN_S)
            free = locations - self._in_use
            self._in_use |= free
        try:
            yield free
        finally:
            with self._copying:
                self._in_use -= free
                self._copying.notify_all()

    def _run_at(
        self,
        table: TableHomes,
        names: Mapping[str, Sequence[tuple[str, int]]],
        free: Collection[str],
        lacking: Mapping[str, Sequence[int]],
        surplus: Mapping[str, Sequence[int]],
        limit_s: float,
        *,
        beside: bool,
    ) -> bool:
        executors: list[str] = []
        locations: list[str] = []
        partitions: list[tuple[int, ...]] = []
        removed: list[tuple[int, ...]] = []
        for location in sorted(free):
            slots = [name for name, cores in names[location] for _ in range(cores)]
            here = lacking.get(location, ())
            for number, executor in enumerate(slots[: max(1, len(here))]):
                executors.append(executor)
                locations.append(location)
                partitions.append(tuple(here[number :: min(len(slots), max(1, len(here)))]))
                removed.append(tuple(surplus.get(location, ())) if number == 0 else ())
        if not executors:
            return False
        order = CopyOrder(self._order(table), tuple(locations), tuple(partitions), tuple(removed), limit_s)
        try:
            reports = self._cluster.run(executors, CopyTask(order))
        except SPARK_ERRORS as error:
            log.info("flow %s: local copies of table %s were not brought up: %s", self._flow, table.name, error)
            self._ids = {}
            return False
        return self._note(table, reports, beside=beside)

    def _note(self, table: TableHomes, reports: Iterable[CopyReport], *, beside: bool) -> bool:
        failure: OnceflowError | None = None
        worked = False
        with self._lock:
            for report in reports:
                for done in report.prepared:
                    table.reached(done.partition, report.location, done.ends)
                    table.restored(done, self._clock())
                table.table.prepared(report.prepared, beside=beside)
                for partition in report.removed:
                    table.removed(partition, report.location)
                worked = worked or bool(report.prepared or report.removed)
                error = report.error
                if isinstance(error, EnvironmentUnusableError) and self._avoids(report.location, error):
                    continue
                failure = failure or error
        if failure is not None:
            raise failure
        return worked

    def _order(self, table: TableHomes) -> PrepareOrder:
        if self._owner is None:
            raise RuntimeError("nobody owns the flow yet")
        owner, state = self._owner, table.table
        moment = state.moment(-1, CommitId(-1, -1, -1), 0)
        return PrepareOrder(
            state.spec.without_code(),
            moment,
            owner.settings,
            owner.transactional_id,
            owner.producer,
            hooks.configured(),
        )

    # ---- beside the batches --------------------------------------------------------------------------

    def _beside(self) -> None:
        self._cluster.described(f"flow {self._flow}, local copies beside the batches")
        while not self._closed:
            self._wake.wait(_LOOK_EVERY_S)
            self._wake.clear()
            try:
                while self.slice():
                    pass
            except Exception as error:  # nothing is lost: the batches bring up what they need
                if not self._closed:  # else its jobs were cancelled
                    log.warning("flow %s: local copies were not brought up beside the batches: %s", self._flow, error)
                    self._sleep(_LOOK_EVERY_S)

    def slice(self) -> bool:
        """Bring copies up for a short time. Returns whether something was done."""
        now = self._clock()
        if self._closed:
            return False
        busy_since = self._busy_since
        if busy_since is None:
            self._look()
        pause = busy_since is None or now - max(self._slice_at, busy_since) >= _STARVED_S
        worked = False
        restored = [table for table in self.tables.values() if table.is_restored]
        with self._lock:
            for table in restored if self._busy_since is None else ():
                table.assign(self._hosts(table.name))
            standbys = self._is_standby_due(now)
        for table in restored:
            with self._lock:
                lacking, surplus, has_homes = self._due(table, standbys=standbys, pause=pause)
            if not lacking and not surplus:
                continue
            self._slice_at = now
            limit_s = _SLICE_S if has_homes else _LONG_SLICE_S
            worked = self._run_copies(table, lacking, limit_s, surplus) or worked
        if standbys and worked:
            self._standby_at = now
        return worked

    def _is_standby_due(self, now: float) -> bool:
        """Whether standby copies are brought up now."""
        since = now - self._standby_at
        if since >= _STANDBY_AT_LEAST_EVERY_S:
            return True  # they may lack nothing, and have to be verified
        if since < _STANDBY_EVERY_S:
            return False
        return sum(table.standby_lacking() for table in self.tables.values()) > _STANDBY_LACKS_MAX

    def _due(
        self, table: TableHomes, *, standbys: bool, pause: bool
    ) -> tuple[dict[str, list[int]], dict[str, list[int]], bool]:
        """What is to be done now for a table: which copies are brought up and removed, by location, and whether that is
        where batches run.

        Args:
            standbys: also standby copies. pause: also where batches run.
        """
        is_urgent = self._busy_since is None or not table.waits  # else the batch itself restores them
        urgent = table.missing(table.homes_of(table.plan.waiting)) if is_urgent else {}
        lacking = table.missing(table.plan.restores)
        if standbys:
            kept = table.plan.copies_beside() - table.plan.restores
            for location, partitions in table.missing(kept).items():
                lacking.setdefault(location, []).extend(partitions)
        surplus = table.surplus_at(self._of_table(table.name).hosts.keys())
        homes = set(table.plan.homes.values())
        if not pause:
            lacking = {location: each for location, each in lacking.items() if location not in homes}
            surplus = {location: each for location, each in surplus.items() if location not in homes}
        for location, partitions in urgent.items():  # records wait for these
            lacking[location] = [*partitions, *lacking.get(location, ())]
        return lacking, surplus, bool(homes & {*lacking, *surplus})
