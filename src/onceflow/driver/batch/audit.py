"""The check before every commit: the reports of all tasks are there, and all rows were written once (I3, I4)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from onceflow.driver.batch.fetched_rows import Rows
from onceflow.errors import BatchAbortedError, OnceflowError, ProgressConflictError, counted
from onceflow.messages import Report
from onceflow.protocol.names import TopicPartition
from onceflow.spark import jvm


@dataclass(frozen=True)
class Audit:
    """What a batch wrote, after the checks have passed."""

    records: int
    nbytes: int
    partitions: dict[str, list[int]]
    max_rss_kib: int
    counts: dict[str, int] = field(default_factory=dict)  # records per topic
    sizes: dict[str, int] = field(default_factory=dict)  # bytes per topic

    @property
    def written(self) -> dict[str, tuple[int, int]]:
        """Records and bytes per topic."""
        return {topic: (count, self.sizes.get(topic, 0)) for topic, count in self.counts.items()}


@dataclass(frozen=True)
class Part:
    """Reports that are checked together: those of the tasks of one stage, or of the driver.

    Args:
        tasks: how many tasks must have reported; None when the driver wrote.
        shuffled: whether Spark may have run the stage again, because shuffle files were lost.
    """

    reports: Sequence[Report]
    tasks: int | None
    shuffled: bool


def in_tasks(count: int) -> str:
    """So many tasks, in words, for the path of a batch."""
    return counted(count, "task")


def audit(
    reports: Sequence[Report], *, tasks: int | None, stage_attempts: Mapping[int, int], flow: str, batch: int
) -> Audit:
    """Check the reports of one stage, or of the driver.

    Args:
        tasks: how many tasks the job had; None when the driver wrote.
        stage_attempts: number of the last attempt of each stage, for stages that Spark may have run again.

    Raises:
        OnceflowError: a task's own error, as it was raised there.
        BatchAbortedError: extra attempts, missing reports or counts that disagree; the next attempt may succeed.
        ProgressConflictError: one partition had two writers; the next attempt would have them, too.
    """
    for report in reports:
        if report.error is not None:
            raise report.error.locate(flow=flow, batch=batch)
    _check_attempts(reports, tasks, stage_attempts, flow, batch)
    owners: dict[TopicPartition, int] = {}
    per_task_rows: dict[int, int] = {}
    per_task_count: dict[int, int] = {}
    partitions: dict[str, list[int]] = {}
    for report in reports:
        per_task_rows[report.task] = report.rows
        if report.topic is None:
            continue
        written = (report.topic, report.partition)
        if written in owners:
            raise ProgressConflictError(
                f"Two tasks wrote to {report.topic}-{report.partition} in one transaction",
                flow=flow,
                batch=batch,
                topic=f"{report.topic}-{report.partition}",
                detail=f"tasks {owners[written]} and {report.task}; their sequence numbers overlap, so the broker may "
                "have dropped records as duplicates",
                next_step="nothing was committed; report this, with the query's plan (df.explain())",
            )
        owners[written] = report.task
        per_task_count[report.task] = per_task_count.get(report.task, 0) + report.count
        partitions.setdefault(report.topic, []).append(report.partition)
    for task, rows in per_task_rows.items():
        if per_task_count.get(task, 0) != rows:
            raise _aborted(
                f"task {task} received {rows} rows and got {per_task_count.get(task, 0)} acknowledged", flow, batch
            )
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for report in reports:
        if report.topic is not None:
            counts[report.topic] = counts.get(report.topic, 0) + report.count
            sizes[report.topic] = sizes.get(report.topic, 0) + report.nbytes
    return Audit(
        counts=counts,
        sizes=sizes,
        records=sum(r.count for r in reports),
        nbytes=sum(r.nbytes for r in reports),
        partitions={topic: sorted(numbers) for topic, numbers in partitions.items()},
        max_rss_kib=max((r.rss_kib for r in reports), default=0),
    )


def combined(audits: Sequence[Audit], tables: Container[str], *, flow: str, batch: int) -> Audit:
    """What all stages of a batch wrote.

    Args:
        tables: topics that hold state; ``records`` does not count theirs.

    Raises:
        ProgressConflictError: two stages wrote to one partition.
    """
    partitions: dict[str, list[int]] = {}
    for checked in audits:
        for topic, numbers in checked.partitions.items():
            both = set(partitions.get(topic, ())) & set(numbers)
            if both:
                raise ProgressConflictError(
                    f"Two stages wrote to {topic}-{min(both)} in one transaction",
                    flow=flow,
                    batch=batch,
                    topic=f"{topic}-{min(both)}",
                    next_step="nothing was committed; check whether a table topic is also an output of the query. "
                    "If not, report this, with the query's plan (df.explain())",
                )
            partitions[topic] = sorted([*partitions.get(topic, ()), *numbers])
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for checked in audits:
        for topic, count in checked.counts.items():
            counts[topic] = counts.get(topic, 0) + count
            sizes[topic] = sizes.get(topic, 0) + checked.sizes[topic]
    return Audit(
        counts=counts,
        sizes=sizes,
        records=sum(count for topic, count in counts.items() if topic not in tables),
        nbytes=sum(checked.nbytes for checked in audits),
        partitions=partitions,
        max_rss_kib=max((checked.max_rss_kib for checked in audits), default=0),
    )


def audit_part(rows: Rows, part: Part, *, flow: str, batch: int) -> Audit:
    """Check the reports of one stage, or of the driver. Errors are those of `audit`."""
    written = part.reports
    stages = {report.stage for report in written}
    attempts = jvm.stage_attempts(rows.sparkSession, stages) if part.shuffled else {}
    if part.tasks is not None and any(isinstance(report.error, BatchAbortedError) for report in written):
        # A second attempt of a task refused to write. The user has to know why the first one failed.
        why = jvm.failed_task_message(rows.sparkSession, stages)
        written = tuple(report.explained(why) for report in written)
    return audit(written, tasks=part.tasks, stage_attempts=attempts, flow=flow, batch=batch)


def _check_attempts(
    reports: Sequence[Report], tasks: int | None, stage_attempts: Mapping[int, int], flow: str, batch: int
) -> None:
    for report in reports:
        if report.attempt:
            raise _aborted(f"task {report.task} is attempt {report.attempt}", flow, batch)
    for stage, attempt in stage_attempts.items():
        if attempt:
            raise _aborted(f"stage {stage} is attempt {attempt}: shuffle files were lost", flow, batch)
    if tasks is None:
        return
    seen = {report.task for report in reports}
    if seen != set(range(tasks)):
        missing = sorted(set(range(tasks)) - seen)
        raise _aborted(f"{in_tasks(tasks)} should have reported, {len(missing)} did not: {missing[:10]}", flow, batch)


def _aborted(detail: str, flow: str, batch: int) -> OnceflowError:
    return BatchAbortedError(
        "The reports of the tasks are not those of one complete attempt",
        flow=flow,
        batch=batch,
        detail=detail,
        next_step="none: the batch is run again under a new epoch",
    )
