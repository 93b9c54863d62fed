"""What tasks report: the same after the way through Spark, completed by what the driver knows."""

from __future__ import annotations

import pytest

from onceflow.errors import BatchAbortedError, OnceflowError
from onceflow.messages import MAX_TEXT, Report, TaskReport, decoded, encoded, from_rows, report_row
from onceflow.state.local.format import CommitId
from onceflow.state.prepare import Prepared
from onceflow.state.spec import StateReport


def report(error: OnceflowError | None) -> Report:
    return Report(3, 1, 40, "out", 2, 50, 7, 700, 9, 0.5, 1000, error)


def failed(detail: str) -> Report:
    return report(
        BatchAbortedError("Extra attempt", next_step="none", flow="orders", topic="out-2", batch=8, detail=detail)
    )


@pytest.mark.parametrize(
    "detail, expected", [("", "the executor was lost"), ("attempt 1", "attempt 1; the executor was lost")]
)
def test_explained(detail: str, expected: str) -> None:
    before = failed(detail)
    after = before.explained("the executor was lost")
    assert type(after.error) is BatchAbortedError
    assert after.error.what == "Extra attempt"
    assert before.error is not None
    assert after.error.fields() == {**before.error.fields(), "detail": expected}
    assert before.error.detail == detail, "the report itself was changed"
    assert report(after.error) == after, "something else was changed"


def test_nothing_to_explain() -> None:
    for one in (report(None), failed("attempt 1")):
        assert one.explained("") is one
    assert report(None).explained("the executor was lost") == report(None)


def test_there_and_back() -> None:
    sent = (report(None), failed("attempt 1"))
    rows = report_row(TaskReport(sent)).to_pylist()
    good, bad = from_rows(tuple(row.values()) for row in rows).written
    assert good == sent[0]
    assert sent[1].error is not None
    assert type(bad.error) is BatchAbortedError
    assert bad.error.fields() == sent[1].error.fields()


def test_an_error_with_a_very_long_text_is_cut() -> None:
    """Every task may have one, and Spark fails a job whose results are larger than spark.driver.maxResultSize."""
    row = encoded(TaskReport((failed("x" * 5_000_000),)))
    assert len(row) < 2 * MAX_TEXT
    (bad,) = decoded([row]).written
    assert type(bad.error) is BatchAbortedError
    assert bad.error.detail.endswith("x... (5000000 characters)")
    assert bad.error.next_step == "none"


def test_all_of_several_tasks() -> None:
    """In the order that they were taken in; nothing of any task is left out."""
    state, copy = (
        StateReport("t", 1, "h", CommitId(1, 2, 3), "restored", 5, 0.1, 7, None, {("in", 0): 9}),
        Prepared("t", 2, "h", "restored", 5, 0.1),
    )
    one = TaskReport((report(None),), (state,), (copy,), (b"rows",))
    two = TaskReport((report(None), report(None)), (), (), (b"more",))
    assert decoded([encoded(one)]) == one
    assert decoded([encoded(one), encoded(two)]) == TaskReport(
        (*one.written, *two.written), (state,), (copy,), (b"rows", b"more")
    )
    assert decoded([]) == TaskReport(())


def test_whether_any_task_failed() -> None:
    assert not TaskReport((report(None),)).failed
    assert TaskReport((report(None), failed("attempt 1"))).failed
