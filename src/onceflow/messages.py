"""The messages between the driver and its tasks. They are immutable, and encoded only in this file.

*Orders* are sent to the tasks: a `WriteOrder` to write outputs, a `StateOrder` to run a process step, a `PrepareOrder`
to prepare a local copy for a batch. They contain secrets (``settings``), so they are sent only with the tasks' code,
never in a local property of Spark or in a log. An order describes a table by a `ProcessSpec` (the same for the whole
query) and an `AttemptContext` (of this attempt of a batch). Both are in ``state/spec.py``, because ``state`` does not
depend on this file.

*Reports* are sent to the driver: one `TaskReport` for each task, whatever it has done. Its encoding is always the same,
but there are two ways to send it. A task that returns no output rows yields the report as its only row. A task of a
process step whose rows are processed further by other tasks cannot do this, because each of its rows is an output. It
adds its report to an accumulator, the only other thing that Spark sends from any task to the driver. (Rows take less
time, and have arrived when the job's result has.)
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from onceflow.client.settings import ClientSettings
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, OnceflowError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.compression import PRODUCER
from onceflow.protocol.names import OwnTopics, TopicPartition
from onceflow.protocol.output_limits import OutputLimits
from onceflow.protocol.timestamps import ANY_TIME, AcceptedTimes
from onceflow.user_code import cut

if TYPE_CHECKING:  # so that tasks that only write do not load ``state``
    from onceflow.state.joins.spec import JoinSpec
    from onceflow.state.prepare import Prepared
    from onceflow.state.spec import AttemptContext, ProcessSpec, StateReport

#: A property of a batch: at which offsets the batch sees the tables that the flow joins with. It has no secrets.
JOINED_PROPERTY = "onceflow.joined"
#: Another one, for ``Flow.enrich``: which attempt runs (``attempt``), when it has begun (``begun_ms``), and how long
#: the calls of one task may take (``limit_s``).
CALLS_PROPERTY = "onceflow.calls"


class _DriverProperties(threading.local):
    """Properties of the batch that a thread of the driver runs by itself."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}


_driver_properties = _DriverProperties()


def set_driver_property(name: str, value: str | None) -> None:
    """Set a property of the batch that this thread runs, for functions that it calls itself. None: there is none."""
    _driver_properties.values.pop(name, None)
    if value is not None:
        _driver_properties.values[name] = value


def forget_driver_properties() -> None:
    """This thread runs no batch any more."""
    _driver_properties.values.clear()


def batch_property(name: str) -> str | None:
    """A property of the batch in which this code runs: in a task a local property of Spark. None: there is none."""
    from pyspark import TaskContext

    context = TaskContext.get()
    found = _driver_properties.values.get(name) if context is None else context.getLocalProperty(name)
    return None if found is None else str(found)


# ---- orders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """How a task finds the partition of a row.

    Args:
        kind: ``key``: by the partition column, else by the key, else any partition that the task owns.
            ``source``: the whole task writes to one partition.
        tasks: how many tasks the job has.
        hash_key: whether the key decides the partition.
        task_partitions: for ``source``, the partition of each task.
        by_number: whether a task only has partitions with ``partition % tasks == task``, in all topics. Nobody has
            moved the rows there, so this is checked.
    """

    kind: str
    tasks: int
    hash_key: bool
    task_partitions: tuple[int, ...] = ()
    by_number: bool = False


@dataclass(frozen=True)
class OutputTopic:
    """An output topic as the driver saw it when the batch began; every task uses the same numbers.

    Args: see `OutputLimits`.
    """

    partitions: int
    max_message_bytes: int
    times: AcceptedTimes = ANY_TIME
    compacted: bool = False
    stored: str = PRODUCER

    def limits(self, topic: str, compression: str) -> OutputLimits:
        """What the topic takes of records that are compressed so."""
        return OutputLimits(topic, self.max_message_bytes, self.compacted, self.stored, compression, self.times)


@dataclass(frozen=True)
class WriteOrder:
    """All that a task needs to write its rows.

    Args:
        topic: the output topic of all rows; None if a ``topic`` column names it for each row.
        transactional_id: None if the guarantee does not use transactions.
        own_topics: topics of the flow that no row may name.
        sequences: the next sequence numbers, if producer id and epoch are used for more than one batch.
        transaction_version: the version that the driver sees. Tasks must use the same protocol as the driver's EndTxn.
        deadline_s: how long a task may take to write its rows, counted from the first write.
        calls_s: how long the processor's calls of other services may take: what is left of the transaction.
        without_outputs: write changes of tables only, and none of the outputs: an earlier version has written them.
        faults: rules of the driver's environment (tests only), see onceflow.hooks.
    """

    flow: str
    batch: int
    settings: ClientSettings
    transactional_id: str | None
    producer: ProducerIdAndEpoch
    compression: str
    topic: str | None
    targets: Mapping[str, OutputTopic]
    routing: Routing
    transaction_version: int
    deadline_s: float
    own_topics: OwnTopics = field(default_factory=OwnTopics)
    sequences: Mapping[TopicPartition, int] = field(default_factory=dict)
    calls_s: float | None = None
    without_outputs: bool = False
    faults: str | None = None


@dataclass(frozen=True)
class Owners:
    """Which task of a process step has which partitions.

    Args:
        groups: a partition belongs to the group ``partition % groups``. All partitions of a group, in the table and in
            other topics, belong to one task.
        tasks: number of the task of each group; -1: none of the job.
    """

    groups: int
    tasks: tuple[int, ...]

    @classmethod
    def by_number(cls, tasks: int) -> Owners:
        """A partition belongs to the task whose number is ``partition % tasks``."""
        return cls(tasks, tuple(range(tasks)))

    @cached_property
    def count(self) -> int:
        """How many tasks there are."""
        return max(self.tasks) + 1

    def task_of(self, partition: int) -> int:
        """The task that has a partition."""
        return self.tasks[partition % self.groups]

    def tasks_of(self, partitions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The tasks of these partitions, an array of integers."""
        found: np.ndarray[Any, Any] = self._by_group[partitions % self.groups]
        return found

    @cached_property
    def _by_group(self) -> np.ndarray[Any, Any]:
        return np.array(self.tasks, np.int32)


#: Which records that its processor yields a task of a process step writes itself: everything; only *side outputs* (dead
#: letters, late records, records that name a topic of their own); nothing.
Writes = Literal["everything", "side outputs", "nothing"]


@dataclass(frozen=True)
class StateOrder:
    """All that a task of a process step needs.

    Args:
        writes: what the task writes itself. It yields the rest as rows.
        topic: topic of outputs that name none. A record that names this topic is not a side output.
        owners: which task has which partitions.
        due: partitions to open even if they have no rows, because something is due there.
        unmoved: whether nobody has moved the rows to these tasks, so that it is checked whether they belong there.
        owner: the transactional id of the flow, also if the batch is written without transactions.
        as_is: whether records that name no topic are written to ``topic`` as they are: no operators follow the step.
        locations: where each task shall run (`ProcessSpec.location`), because its local copies are there. Empty: it may
            run anywhere.
    """

    spec: ProcessSpec
    moment: AttemptContext
    write: WriteOrder
    writes: Writes
    topic: str | None
    owners: Owners
    unmoved: bool = False
    due: frozenset[int] = frozenset()
    owner: str = ""
    as_is: bool = False
    locations: tuple[str, ...] = ()

    def due_in(self, task: int) -> list[int]:
        """The due partitions that a task has to open. Task -1 is the driver, which runs all of them."""
        if task < 0:
            return sorted(self.due)
        return sorted(p for p in self.due if self.owners.task_of(p) == task)

    def of_host(self, problem: OnceflowError, task: int) -> OnceflowError:
        """The error of a task, as the driver needs it: another host may do what this one cannot."""
        if isinstance(problem, EnvironmentUnusableError) and self.locations and task >= 0:
            return UnusableHostError.of(problem, self.locations[task])
        return problem

    def check_location(self, task: int, location: str) -> None:
        """Check that a task runs where its local copies are.

        Raises:
            MisplacedError: it runs elsewhere: it would have to restore them within the transaction.
        """
        if self.locations and self.locations[task] != location:
            raise MisplacedError(
                f"A task of table {self.spec.table} runs at {location}, where its local copies are not",
                detail=_WANTED + self.locations[task],
                next_step="none: the batch is planned again",
            )


@dataclass(frozen=True)
class PrepareOrder:
    """All that a task needs to bring a local copy up to what is committed, before a batch begins.

    Args:
        moment: the moment of the next batch, as far as it is known.
        transactional_id, producer: transactional id, producer id and epoch of the flow. They change when a newer driver
            fences this one.
        faults: rules of the driver's environment (tests only), see onceflow.hooks.
    """

    spec: ProcessSpec
    moment: AttemptContext
    settings: ClientSettings
    transactional_id: str
    producer: ProducerIdAndEpoch
    faults: str | None = None


@dataclass(frozen=True)
class JoinOrder:
    """All that a task of ``Flow.join_table`` needs. It is a part of the query, so it is the same for all batches. The
    offsets of a batch are in the local property ``JOINED_PROPERTY``.

    Args:
        on: the column with the keys.
        inner: whether rows without a match are left out.
        fields: the columns to add.
        raw: whether there is one column, with the whole value.
        corrupt: a further column, with values that cannot be read; None: such a value stops the flow.
    """

    spec: JoinSpec
    settings: ClientSettings
    on: str
    inner: bool
    fields: pa.Schema
    raw: bool
    flow: str
    corrupt: str | None = None


@dataclass(frozen=True)
class CopiesOrder:
    """All that a task needs that brings the copies of joined tables on its host to the offsets of a batch."""

    specs: tuple[JoinSpec, ...]
    ends: Mapping[str, Mapping[int, int]]
    settings: ClientSettings


# ---- reports ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskInfo:
    """The task that runs the code: Spark's numbers for it, or the driver.

    Args:
        where: ``task`` or ``driver``.
        task: number of the task in its job; -1: the driver.
        attempt: Spark's attempt number of the task (0: the first).
        stage: Spark's stage id; -1: the driver.
    """

    where: str
    task: int
    attempt: int
    stage: int = -1


_WANTED, _AT = "they are at ", "; at "

#: Code of a task that runs in the driver.
DRIVER = TaskInfo("driver", -1, 0)


@dataclass(frozen=True)
class Report:
    """A task's report about one partition that it has written, or only that the task ran.

    Args:
        task, attempt, stage: see `TaskInfo`.
        topic, partition: the partition that was written; topic is None in a report that only says that the task ran.
        base_offset: offset of the first record written to the partition.
        count: how many records were acknowledged in the partition.
        nbytes: their encoded size in bytes.
        rows: how many rows the task received.
        seconds: how long the task took.
        rss_kib: peak resident memory of its process.
        error: why the task has failed, instead of a count.
    """

    task: int
    attempt: int
    stage: int
    topic: str | None
    partition: int
    base_offset: int
    count: int
    nbytes: int
    rows: int
    seconds: float
    rss_kib: int
    error: OnceflowError | None = None

    def explained(self, why: str) -> Report:
        """The same report, with this text added to the detail of its error."""
        if self.error is None or not why:
            return self
        fields = self.error.fields()
        fields["detail"] = f"{fields['detail']}; {why}" if fields["detail"] else why
        return replace(self, error=type(self.error)(self.error.what, **fields))


@dataclass(frozen=True)
class TaskReport:
    """All that one task has done, or all tasks of a stage.

    Args:
        written: one report for each partition that was written; each task has at least one.
        states: one report for each partition of a table that was opened.
        prepared: local copies that were brought up to date, also by a task that has failed.
        returned: rows that the driver has to write; each item is an Arrow stream (``task/step_outputs.py``).
        read: how many records of each topic tasks have read by themselves.
    """

    written: tuple[Report, ...]
    states: tuple[StateReport, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    returned: tuple[bytes, ...] = ()
    read: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether any task has failed."""
        return any(report.error is not None for report in self.written)


class NotColocatedError(BatchAbortedError):
    """Internal: outputs belong to partitions of other tasks. The batch runs again, with a shuffle of the outputs."""


class NotCopartitionedError(BatchAbortedError):
    """Internal: keys are not where Kafka's partitioner puts them. The batch runs again, with a shuffle."""


class MisplacedError(BatchAbortedError):
    """Internal: Spark runs a task on another host than that of its local copies. The batch is planned again.

    Attributes:
        wanted: where the task should have run.
    """

    @property
    def wanted(self) -> str:
        return self.detail.removeprefix(_WANTED) if self.detail.startswith(_WANTED) else ""


class UnusableHostError(MisplacedError):
    """Internal: a task cannot use the state folder of its host. The batch is planned again, without that host.

    Attributes:
        location: see `ProcessSpec.location`.
    """

    @classmethod
    def of(cls, problem: EnvironmentUnusableError, location: str) -> UnusableHostError:
        """The error for a problem at a location."""
        return cls(problem.what, **{**problem.fields(), "detail": f"{problem.detail}{_AT}{location}"})

    @property
    def location(self) -> str:
        return self.detail.rpartition(_AT)[2]

    def problem(self) -> EnvironmentUnusableError:
        """What the task has met."""
        return EnvironmentUnusableError(self.what, **{**self.fields(), "detail": self.detail.rpartition(_AT)[0]})


#: The schema of rows that are reports, for Spark (as ``mapInArrow`` declares it) and for Arrow.
REPORT_SPARK_SCHEMA = "report binary"
REPORT_SCHEMA = pa.schema([("report", pa.binary())])
#: Maximum number of characters of an error's text that are sent to the driver.
MAX_TEXT = 20_000


def encoded(report: TaskReport) -> bytes:
    """A report as bytes, to be sent to the driver."""
    # The text of an error of user code may be large, in every task. Spark fails a job whose results are larger than
    # spark.driver.maxResultSize.
    written = tuple(each if each.error is None else replace(each, error=_cut(each.error)) for each in report.written)
    return pickle.dumps(replace(report, written=written), protocol=pickle.HIGHEST_PROTOCOL)


def decoded(reports: Iterable[bytes]) -> TaskReport:
    """One report of all that the tasks of a stage have done, from the `encoded` reports."""
    every: list[TaskReport] = [pickle.loads(report) for report in reports]
    return TaskReport(
        written=tuple(each for report in every for each in report.written),
        states=tuple(each for report in every for each in report.states),
        prepared=tuple(each for report in every for each in report.prepared),
        returned=tuple(each for report in every for each in report.returned),
        read=sum((Counter(report.read) for report in every), Counter()),
    )


def report_row(report: TaskReport) -> pa.RecordBatch:
    """The report as a row, for a task that yields no other row."""
    return pa.record_batch([pa.array([encoded(report)], pa.binary())], schema=REPORT_SCHEMA)


def from_rows(rows: Iterable[Any]) -> TaskReport:
    """The report from the rows that ``DataFrame.collect`` returns for such tasks."""
    return decoded(bytes(row[0]) for row in rows)


def _cut(error: OnceflowError) -> OnceflowError:
    fields = error.fields()
    fields["detail"] = cut(fields["detail"], MAX_TEXT)
    return type(error)(cut(error.what, MAX_TEXT), **fields)
