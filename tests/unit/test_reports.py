"""What tasks report: the same after the way through Spark, completed by what the driver knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onceflow.errors import BatchAbortedError, OnceflowError
from onceflow.task import reports
from onceflow.task.reports import Report


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
    sent = [report(None), failed("attempt 1")]
    rows = reports.to_arrow(sent).to_pylist()
    good, bad = reports.from_rows(SimpleNamespace(asDict=lambda row=row: dict(row)) for row in rows)
    assert good == sent[0]
    assert sent[1].error is not None
    assert type(bad.error) is BatchAbortedError
    assert bad.error.fields() == sent[1].error.fields()


def test_an_error_with_a_very_long_text_is_cut() -> None:
    """Every task may have one, and Spark fails a job whose results are larger than spark.driver.maxResultSize."""
    rows = reports.to_arrow([failed("x" * 5_000_000)])
    assert rows.nbytes < 2 * reports.MAX_TEXT
    (bad,) = reports.from_dicts(rows.to_pylist())
    assert type(bad.error) is BatchAbortedError
    assert bad.error.detail.endswith("x... (5000000 characters)")
    assert bad.error.next_step == "none"
