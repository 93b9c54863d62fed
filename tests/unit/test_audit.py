"""The check before a commit: one clean attempt, one writer for each partition, every row acknowledged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from onceflow import errors
from onceflow.driver.batch.audit import Audit, audit, combined
from onceflow.errors import (
    BadRecordError,
    BatchAbortedError,
    FencedError,
    OnceflowError,
    ProgressConflictError,
    TransactionTimeoutError,
)
from onceflow.messages import REPORT_SCHEMA, REPORT_SPARK_SCHEMA, Report, TaskReport, from_rows, report_row


def report(task: int, topic: str | None, partition: int, count: int, rows: int | None = None, **more: Any) -> Report:
    fields = {
        "attempt": 0,
        "stage": 40,
        "base_offset": 100,
        "nbytes": 10 * count,
        "seconds": 0.25,
        "rss_kib": 1000 + task,
        **more,
    }
    return Report(
        task=task, topic=topic, partition=partition, count=count, rows=count if rows is None else rows, **fields
    )


def idle(task: int, **more: Any) -> Report:
    return report(task, None, -1, 0, **{"base_offset": -1, **more})


COUNTS, SIZES = {"a": 7, "b": 2}, {"a": 70, "b": 20}
CLEAN = [report(0, "a", 0, 3, 5), report(0, "b", 2, 2, 5), report(1, "a", 1, 4), idle(2)]


def check(given: Sequence[Report], tasks: int | None = 3, stages: dict[int, int] | None = None) -> Audit:
    return audit(given, tasks=tasks, stage_attempts=stages or {}, flow="orders", batch=8)


def test_clean() -> None:
    assert check(CLEAN) == Audit(
        records=9, nbytes=90, partitions={"a": [0, 1], "b": [2]}, max_rss_kib=1002, counts=COUNTS, sizes=SIZES
    )


def test_clean_in_any_order() -> None:
    assert check(CLEAN[::-1]) == check(CLEAN)


def test_clean_without_rows() -> None:
    assert check([idle(0), idle(1)], 2) == Audit(0, 0, {}, 1001)


def test_driver_wrote() -> None:
    assert check([report(-1, "a", 0, 3)], None).records == 3
    assert check([idle(-1)], None).records == 0


@pytest.mark.parametrize("which", range(4))
def test_extra_task_attempt_anywhere(which: int) -> None:
    """I3: whatever such an attempt reports, an earlier one may have written other rows under the same numbers."""
    given = [dataclasses.replace(r, attempt=1) if n == which else r for n, r in enumerate(CLEAN)]
    with pytest.raises(BatchAbortedError, match="not those of one complete attempt") as caught:
        check(given)
    assert (caught.value.flow, caught.value.batch) == ("orders", 8)
    assert f"task {CLEAN[which].task} is attempt 1" in caught.value.detail


def test_first_stage_attempts_are_clean() -> None:
    assert check(CLEAN, stages={40: 0, 41: 0}) == check(CLEAN)


@pytest.mark.parametrize("stages", [{40: 1}, {40: 0, 41: 2}, {41: 2, 40: 0}])
def test_extra_stage_attempt(stages: dict[int, int]) -> None:
    """I3: task attempts start at 0 again in it, so the reports look clean."""
    with pytest.raises(BatchAbortedError, match="not those of one complete attempt") as caught:
        check(CLEAN, stages=stages)
    ((stage, attempt),) = [(s, a) for s, a in stages.items() if a]
    assert f"stage {stage} is attempt {attempt}" in caught.value.detail
    assert (caught.value.flow, caught.value.batch) == ("orders", 8)


def test_extra_attempt_on_the_driver_path() -> None:
    with pytest.raises(BatchAbortedError):
        check([report(-1, "a", 0, 3, attempt=1)], None)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_task(missing: int) -> None:
    with pytest.raises(BatchAbortedError) as caught:
        check([r for r in CLEAN if r.task != missing])
    assert f"3 tasks should have reported, 1 did not: [{missing}]" in caught.value.detail


def test_no_report_at_all() -> None:
    with pytest.raises(BatchAbortedError, match="did not"):
        check([], 2)


def test_report_of_a_task_that_the_job_did_not_have() -> None:
    with pytest.raises(BatchAbortedError):
        check(CLEAN, 2)


def test_two_writers_of_one_partition() -> None:
    """I4. The counts of both agree with what was acknowledged: only the owner tells."""
    given = [report(0, "a", 0, 3), report(1, "a", 0, 3)]
    with pytest.raises(ProgressConflictError, match="Two tasks wrote to a-0") as caught:
        check(given, 2)
    assert (caught.value.flow, caught.value.batch, caught.value.topic) == ("orders", 8, "a-0")
    assert "tasks 0 and 1" in caught.value.detail


def test_same_partition_number_of_two_topics_is_no_conflict() -> None:
    assert check([report(0, "a", 0, 3), report(1, "b", 0, 3)], 2).partitions == {"a": [0], "b": [0]}


@pytest.mark.parametrize(
    "given",
    [
        [report(0, "a", 0, 3, 4)],
        [report(0, "a", 0, 3, 2)],
        [idle(0, rows=1)],
        [report(0, "a", 0, 3, 5), report(0, "a", 1, 3, 5)],
        # Too few here, too many there: the sum is right.
        [report(0, "a", 0, 3, 4), report(1, "a", 1, 3, 2)],
    ],
)
def test_counts_that_disagree(given: list[Report]) -> None:
    with pytest.raises(BatchAbortedError, match="not those of one complete attempt") as caught:
        check(given, len({r.task for r in given}))
    assert "received" in caught.value.detail
    assert (caught.value.flow, caught.value.batch) == ("orders", 8)


@pytest.mark.parametrize("kind", [BadRecordError, FencedError, TransactionTimeoutError, BatchAbortedError])
def test_error_of_a_task_is_raised_as_it_was_and_located(kind: type[OnceflowError]) -> None:
    error = kind("it broke", next_step="mend it", topic="a-1", detail="d")
    # It says more than any count that disagrees because of it.
    given = [*CLEAN[:2], idle(1, rows=4, error=error, attempt=1), idle(2)]
    with pytest.raises(kind) as caught:
        check(given)
    assert type(caught.value) is kind
    assert (caught.value.flow, caught.value.topic, caught.value.batch) == ("orders", "a-1", 8)
    assert (caught.value.what, caught.value.next_step, caught.value.detail) == ("it broke", "mend it", "d")


# ---- the way from task to driver ---------------------------------------------------------------------

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, OnceflowError)]


def travelled(given: Sequence[Report], as_bytearray: bool = False) -> list[Report]:
    """As ``DataFrame.collect`` gives them; Spark's binary is bytearray in classic pyspark before 4.1, bytes since."""
    rows = [Row(**row) for row in report_row(TaskReport(tuple(given))).to_pylist()]
    if as_bytearray:
        rows = [Row(report=bytearray(row["report"])) for row in rows]
    return list(from_rows(rows).written)


def test_reports_travel_unchanged() -> None:
    assert travelled(CLEAN) == CLEAN


def test_no_reports_travel_too() -> None:
    assert report_row(TaskReport(())).schema == REPORT_SCHEMA
    assert travelled([]) == []


@pytest.mark.parametrize("as_bytearray", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_with_all_they_know(kind: type[OnceflowError], as_bytearray: bool) -> None:
    error = kind("it broke", next_step="mend it", topic="a-1", detail="dé\0tail", flow="orders", batch=3)
    (back,) = travelled([idle(0, error=error)], as_bytearray)
    assert back.error is not None
    assert type(back.error) is kind
    assert (back.error.what, back.error.fields()) == (error.what, error.fields())


def test_both_names_of_the_schema_agree() -> None:
    """Spark checks Arrow batches of mapInArrow against the declared types only at run time."""
    arrow = {"binary": pa.binary()}
    declared = [column.strip().split(" ") for column in REPORT_SPARK_SCHEMA.split(",")]
    assert [(name, arrow[kind]) for name, kind in declared] == [(f.name, f.type) for f in REPORT_SCHEMA]


def test_largest_numbers_travel() -> None:
    big = report(2**31 - 1, "a", 2**31 - 1, 2**40, stage=2**31 - 1, base_offset=2**63 - 1, nbytes=2**50)
    assert travelled([big]) == [big]


def test_stages_combined() -> None:
    """What the state stage wrote to its tables is in no count of outputs; one partition has one stage."""
    state = check([report(0, "table", 0, 4), report(1, "table", 1, 1)], 2)
    outputs = check([report(0, "a", 0, 3)], 1)
    both = combined([outputs, state], {"table"}, flow="orders", batch=8)
    assert (both.records, both.nbytes) == (3, 80)
    assert both.written == {"a": (3, 30), "table": (5, 50)}
    assert both.partitions == {"a": [0], "table": [0, 1]}
    with pytest.raises(ProgressConflictError, match="Two stages wrote to table-1"):
        combined([check([report(0, "table", 1, 1)], 1), state], {"table"}, flow="orders", batch=8)
