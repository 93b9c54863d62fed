"""The messages between the driver and its tasks. All of them are frozen, and encoded in this file only.

*Orders* go to the tasks: a `WriteOrder` for rows that are outputs, a `StateOrder` for a process step, a `PrepareOrder`
for the local copies that a batch will need. They hold secrets (``settings``), so they travel with the tasks' code only,
never as a local property of Spark's or in a log. What an order says of a table is a `ProcessSpec` (fixed with the
query) and a `Moment` (of this batch). Both are in ``state/spec.py``, because ``state`` knows nothing of this file.

*Reports* come back: one `TaskReport` for each task, whatever it has done. It is encoded in one way, and takes one of
two ways. A task whose rows nobody else needs yields its report as its only row. A task of a process step whose rows go
on to other tasks cannot, as every row of it would be an output; it adds its report to an accumulator, the only other
thing that Spark brings from any task to the driver. (Rows cost less, and are there when the job's result is.)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from onceflow.client.settings import ClientSettings
from onceflow.errors import BatchAbortedError, OnceflowError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.names import OwnTopics, TopicPartition
from onceflow.user_code import cut

if TYPE_CHECKING:  # tasks that only write load nothing of ``state``
    from onceflow.state.local.prepare import Prepared
    from onceflow.state.spec import Moment, ProcessSpec, StateReport

# ---- orders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """How a task finds the partition of a row.

    Args:
        kind: ``key``: by partition column, then by key, then any partition the task owns;
            ``source``: the whole task writes to one partition.
        tasks: how many tasks the job has.
        hash_key: whether keys decide.
        task_partitions: for ``source``, partition of each task.
    """

    kind: str
    tasks: int
    hash_key: bool
    task_partitions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """An output topic as the driver saw it when the batch began; every task uses the same numbers."""

    partitions: int
    max_message_bytes: int


@dataclass(frozen=True)
class WriteOrder:
    """All a task needs to write its rows.

    Args:
        topic: the one output topic; None when rows name theirs in a ``topic`` column.
        transactional_id: None when the guarantee does without transactions.
        own_topics: topics of the flow that no row may name.
        sequences: where the identity's sequence numbers go on, for an identity that outlives a batch.
        transaction_version: as the driver sees it; tasks must not mix protocols with the driver's EndTxn.
        deadline_s: how long a task may take over its rows, from the first one it writes.
        faults: rules of the driver's environment (tests only), see onceflow.hooks.
    """

    flow: str
    batch: int
    settings: ClientSettings
    transactional_id: str | None
    identity: ProducerIdAndEpoch
    compression: str
    topic: str | None
    targets: Mapping[str, Target]
    routing: Routing
    transaction_version: int
    deadline_s: float
    own_topics: OwnTopics = field(default_factory=OwnTopics)
    sequences: Mapping[TopicPartition, int] = field(default_factory=dict)
    faults: str | None = None


#: What a task of a process step writes of what its processor yields: everything; only *side outputs* (dead letters,
#: late records, records that name a topic of their own); nothing.
Writes = Literal["everything", "side outputs", "nothing"]


@dataclass(frozen=True)
class StateOrder:
    """All a task of a process step needs.

    Args:
        writes: what the task writes itself; the rest are rows that it yields.
        topic: where outputs go that name no topic. A record that names this one is no side output.
        modulus: a partition belongs to the task (or to the table partition, see ``co_partitioned``) whose number is
            its remainder by this.
        co_partitioned: rows come from source partitions that are numbered as those of the table.
        due: partitions to open even if they have no rows: something is due there.
        taken: with ``co_partitioned``, the source partitions that each task reads; empty where nothing is due.
    """

    spec: ProcessSpec
    moment: Moment
    write: WriteOrder
    writes: Writes
    topic: str | None
    modulus: int
    co_partitioned: bool = False
    due: frozenset[int] = frozenset()
    taken: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def due_in(self, task: int) -> list[int]:
        """The due partitions that a task has to open; -1: the driver, which runs all of them."""
        if task < 0:
            return sorted(self.due)
        if self.co_partitioned:
            return sorted(self.due & set(self.taken.get(task, ())))
        return sorted(p for p in self.due if p % self.modulus == task)


@dataclass(frozen=True)
class PrepareOrder:
    """All a task needs to bring a local copy up to what is committed, before a batch begins.

    Args:
        moment: of the batch to come, as far as it is known.
        transactional_id, identity: what the flow writes under as long as no newer driver has taken it over.
    """

    spec: ProcessSpec
    moment: Moment
    settings: ClientSettings
    transactional_id: str
    identity: ProducerIdAndEpoch


# ---- reports ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskPlace:
    """Where code runs: Spark's numbers for the task, or the driver.

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


#: The driver, where it does what a task would.
DRIVER = TaskPlace("driver", -1, 0)


@dataclass(frozen=True)
class Report:
    """What a task says of one partition that it has written; or only that it ran.

    Args:
        task, attempt, stage: see `TaskPlace`.
        topic, partition: what was written; topic is None in a report that only says that the task ran.
        base_offset: offset of the first record written to the partition.
        count: records acknowledged there. nbytes: their encoded size.
        rows: rows the task received.
        seconds: how long the task took. rss_kib: peak resident memory of its process.
        error: why the task gave up, instead of a count.
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
        """The same report, its error's detail completed."""
        if self.error is None or not why:
            return self
        fields = self.error.fields()
        fields["detail"] = f"{fields['detail']}; {why}" if fields["detail"] else why
        return replace(self, error=type(self.error)(self.error.what, **fields))


@dataclass(frozen=True)
class TaskReport:
    """All that one task has done, or all tasks of a stage.

    Args:
        written: one for each partition that was written; each task has at least one.
        states: one for each partition of a table that was opened.
        prepared: local copies that were brought up to date, also by a task that has failed.
        returned: rows that the driver is to write, each item an Arrow stream (``task/step_outputs.py``).
    """

    written: tuple[Report, ...]
    states: tuple[StateReport, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    returned: tuple[bytes, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether any task gave up."""
        return any(report.error is not None for report in self.written)


class NotColocatedError(BatchAbortedError):
    """Internal: outputs belong to partitions of other tasks. The batch runs again, with a shuffle of the outputs."""


class NotCopartitionedError(BatchAbortedError):
    """Internal: keys are not where Kafka's partitioner puts them. The batch runs again, with a shuffle."""


#: Rows that are reports: Spark's name of the schema (what ``mapInArrow`` declares) and Arrow's.
REPORT_SPARK_SCHEMA = "report binary"
REPORT_SCHEMA = pa.schema([("report", pa.binary())])
#: Characters of an error's text that go to the driver.
MAX_TEXT = 20_000


def encoded(report: TaskReport) -> bytes:
    """A report for the way to the driver."""
    # An error of user code may have all its data in its text, in every task: Spark fails a job whose results are larger
    # than spark.driver.maxResultSize.
    written = tuple(each if each.error is None else replace(each, error=_cut(each.error)) for each in report.written)
    return pickle.dumps(replace(report, written=written), protocol=pickle.HIGHEST_PROTOCOL)


def decoded(reports: Iterable[bytes]) -> TaskReport:
    """What all tasks of a stage have done, of what each has `encoded`."""
    every: list[TaskReport] = [pickle.loads(report) for report in reports]
    return TaskReport(
        written=tuple(each for report in every for each in report.written),
        states=tuple(each for report in every for each in report.states),
        prepared=tuple(each for report in every for each in report.prepared),
        returned=tuple(each for report in every for each in report.returned),
    )


def report_row(report: TaskReport) -> pa.RecordBatch:
    """The row of a task that yields no other."""
    return pa.record_batch([pa.array([encoded(report)], pa.binary())], schema=REPORT_SCHEMA)


def from_rows(rows: Iterable[Any]) -> TaskReport:
    """Of what ``DataFrame.collect`` returns for such tasks."""
    return decoded(bytes(row[0]) for row in rows)


def _cut(error: OnceflowError) -> OnceflowError:
    fields = error.fields()
    fields["detail"] = cut(fields["detail"], MAX_TEXT)
    return type(error)(cut(error.what, MAX_TEXT), **fields)
