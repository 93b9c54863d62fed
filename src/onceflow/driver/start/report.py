"""What a start has found: who was fenced, where the flow resumes, what may be restored, and how it will write.

It is one log line at INFO, and ``serve`` prints it. It is made from what the start knows anyway: nothing is asked for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from onceflow.client.addresses import parse_servers
from onceflow.driver.start.startup import Startup
from onceflow.engine_query import DIRECT
from onceflow.errors import counted
from onceflow.external.sink import ExternalSink
from onceflow.planning.engine import AUTO, DRIVER, TASKS, EngineChoice
from onceflow.planning.options import EXACTLY_ONCE, SinkOptions
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import DriverProcess, Progress

Dataset = tuple[str, str]
"""Namespace and name, as OpenLineage's specification of names says."""

_OPEN = ("Ongoing", "PrepareAbort")
_MOST_OFFSETS = 8
_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"))


@dataclass(frozen=True)
class EarlierDriver:
    """The driver that had the transactional id before.

    Args:
        aborted: whether its open transaction was aborted.
    """

    producer_id: int
    producer_epoch: int
    aborted: bool


@dataclass(frozen=True)
class SourceStart:
    """Where a source is read from. Args: waiting: offsets from there to the last stable offset at the start."""

    offsets: Mapping[int, int]
    waiting: int


@dataclass(frozen=True)
class StartReport:
    """One start of a flow.

    Args:
        producer: producer id and epoch of this driver; None: it uses no transactional id, so it fences nobody.
        batch: number of the last committed batch; None: the flow is new.
        progress_ms: when the progress that it resumes from was written, in epoch milliseconds.
        committed_by: the driver that has committed that progress; None: a command has, or it is not known.
        tables: partitions of each table, and how many records of its topics a restore would read at most; None: it has
            no changelog.
        kafka: namespace of the cluster's topics. dataset, target: of an external sink.
        checkpoint: address of the checkpoint with Spark's state.
        engine, engine_reason, place: see `EngineChoice`.
    """

    flow: str
    guarantee: str
    transactional_id: str
    producer: tuple[int, int] | None
    earlier: EarlierDriver | None
    batch: int | None
    progress_ms: int | None
    committed_by: DriverProcess | None
    sources: Mapping[str, SourceStart]
    tables: Mapping[str, tuple[int, int | None]]
    outputs: Sequence[str]
    kafka: str
    target: str | None
    dataset: Dataset | None
    checkpoint: str | None
    spark: str
    engine: str
    engine_reason: str
    place: str

    def lines(self, now_ms: int) -> Iterator[str]:
        """For people, the most important line first."""
        owner = "no transactional id, so it fences no other driver"
        if self.producer is not None:
            owner = f"{self.transactional_id}, producer id {self.producer[0]}, epoch {self.producer[1]}"
        yield f"flow {self.flow} starts: {self.guarantee}, {owner}"
        if self.producer is not None and self.earlier is not None:
            ending = "its open transaction was aborted" if self.earlier.aborted else "it had no open transaction"
            yield f"fenced: producer id {self.earlier.producer_id}, epoch {self.earlier.producer_epoch}; {ending}"
        yield self._since(now_ms)
        if (last := self.committed_by) is not None:
            old = _age(now_ms - last.since_ms)
            yield f"the driver that committed last: host {last.host}, process {last.pid}, started {old} ago"
        for topic, source in self.sources.items():
            yield f"reads {topic}: {_offsets(source.offsets)}; {counted(source.waiting, 'offset')} waiting"
        for table, (partitions, records) in self.tables.items():
            held = "local only" if records is None else f"at most {counted(records, 'record')} to restore"
            yield f"table {table}: {counted(partitions, 'partition')}, {held}"
        if self.checkpoint is not None:
            yield f"state in Spark: checkpoint {self.checkpoint}"
        to = self.target or ", ".join(self.outputs) or "the topics of its rows"
        yield f"writes {to}: {self._engine()}; {self.spark}"
        yield f"engine {self.engine}: {self.engine_reason}"

    def facts(self) -> dict[str, Any]:
        """For log lines as JSON."""
        earlier = None if self.earlier is None or self.producer is None else vars(self.earlier)
        return {
            "guarantee": self.guarantee,
            "transactional_id": None if self.producer is None else self.transactional_id,
            "producer_id": None if self.producer is None else self.producer[0],
            "producer_epoch": None if self.producer is None else self.producer[1],
            "fenced": earlier,
            "committed_batch": self.batch,
            "progress_ms": self.progress_ms,
            "committed_by": None if self.committed_by is None else vars(self.committed_by),
            "sources": {topic: {"offsets": dict(s.offsets), "waiting": s.waiting} for topic, s in self.sources.items()},
            "tables": {
                name: {"partitions": count, "records_at_most": most} for name, (count, most) in self.tables.items()
            },
            "outputs": [self.target] if self.target else list(self.outputs),
            "checkpoint": self.checkpoint,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
        }

    def inputs(self) -> dict[str, Dataset]:
        """The topics that are read."""
        return {topic: (self.kafka, topic) for topic in self.sources}

    def datasets_written(self) -> dict[str, Dataset]:
        """What is written, as far as it is known at a start, by the names in `BatchSummary`."""
        if self.target is not None and self.dataset is not None:
            return {self.target: self.dataset}
        tables = [table for table, (_, records) in self.tables.items() if records is not None]
        return {topic: (self.kafka, topic) for topic in (*self.outputs, *tables)}

    def _since(self, now_ms: int) -> str:
        if self.batch is None or self.progress_ms is None:
            return "first start: nothing is committed yet"
        after = f"resumes after batch {self.batch}" if self.batch else "no batch is committed yet"
        return f"{after}; its progress is {_age(now_ms - self.progress_ms)} old"

    def _engine(self) -> str:
        if self.engine == DIRECT:
            return _PLACES[self.place]
        return "all batches by tasks" if self.place == TASKS else "small batches by the driver, others by tasks"


_PLACES = {
    AUTO: "the driver reads and writes; with a large backlog and enough cores, tasks do",
    DRIVER: "the driver reads and writes",
    TASKS: "tasks read and write",
}


def report(
    startup: Startup,
    spark: SparkSession,
    options: SinkOptions,
    *,
    outputs: Sequence[str] = (),
    sink: ExternalSink | None = None,
    followed: Progress | None = None,
    checkpoint: str | None = None,
    choice: EngineChoice,
) -> StartReport:
    """The report of a start that is done, before its query runs.

    Args:
        outputs: topics that are written, as far as they are known. They may include those of tables.
        followed: progress as the external system has it, if Kafka's was behind and has followed.
    """
    session = startup.takeover.session
    found, now = (followed or startup.takeover.found), (followed or startup.takeover.progress_now)
    # at_least_once with state writes under the transactional id, too (see `driver/kafka/delivery.py`).
    owns = options.guarantee == EXACTLY_ONCE or bool(startup.steps) or sink is not None
    identity = session.transactions.identity
    read = {} if now is None else {topic: now.offsets.get(topic, {}) for topic in startup.takeover.sources}
    changelogs = {} if found is None else found.changelogs
    tables: dict[str, tuple[int, int | None]] = {}
    for name, step in startup.steps.items():
        topics = step.spec.topics
        ends = [*changelogs.get(name, {}).values(), *changelogs.get(name + INTERNAL_SUFFIX, {}).values()]
        tables[name] = topics.partitions, sum(ends) if topics.changelog else None
    return StartReport(
        flow=startup.flow,
        guarantee=options.guarantee,
        transactional_id=startup.takeover.names.transactional_id,
        producer=(identity.producer_id, identity.producer_epoch) if owns else None,
        earlier=_earlier(session.earlier),
        batch=None if found is None else found.batch_id,
        progress_ms=None if found is None else found.time_ms,
        committed_by=None if found is None else found.driver,
        sources={
            topic: SourceStart(offsets, sum(max(0, end - offsets.get(n, 0)) for n, end in source.latest.items()))
            for (topic, offsets), source in zip(read.items(), startup.takeover.sources.values(), strict=True)
        },
        tables=tables,
        outputs=[topic for topic in outputs if topic not in startup.own_topics.tables],
        kafka=f"kafka://{parse_servers(startup.takeover.settings.bootstrap_servers)[0]}",
        target=None if sink is None else sink.target,
        dataset=None if sink is None else sink.dataset,
        checkpoint=checkpoint,
        spark=f"Spark {spark.version}, {spark.sparkContext.master}",
        engine=choice.engine,
        engine_reason=choice.reason,
        place=choice.place,
    )


def _earlier(described: Mapping[str, Any] | None) -> EarlierDriver | None:
    if described is None or int(described.get("producer_id", -1)) < 0:
        return None
    aborted = described["state"] in _OPEN
    return EarlierDriver(int(described["producer_id"]), int(described["producer_epoch"]), aborted)


def _offsets(offsets: Mapping[int, int]) -> str:
    known = sorted(offsets.items())
    shown = ", ".join(f"{partition}: {offset}" for partition, offset in known[:_MOST_OFFSETS])
    more = f" and {len(known) - _MOST_OFFSETS} more partitions" if len(known) > _MOST_OFFSETS else ""
    return f"from {{{shown}}}{more}"


def _age(milliseconds: float) -> str:
    seconds = max(0.0, milliseconds / 1000)
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
