"""Reports of batches that Spark has not run look like Spark's own."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from onceflow.driver.record.offset_log import SourceRange
from onceflow.planning.options import BatchSummary
from onceflow.spark.query_progress import ProgressReports

SPARK_4 = issubclass(StreamingQueryProgress, dict)
ID, RUN_ID = "6aa1c7aa-badb-4f40-8648-fab271416b13", "1e18c9e8-f658-4945-877f-25a16e2f64a6"
AT_0, AT_240, AT_480, AT_END = (
    {"in": {0: 0, 1: 0, 2: 0, 3: 0}},
    {"in": {0: 240, 1: 280, 2: 200, 3: 280}},
    {"in": {0: 480, 1: 560, 2: 400, 3: 560}},
    {"in": {0: 600, 1: 700, 2: 500, 3: 700}},
)
#: What Spark 4.2 reported of the second batch of a query.
SPARKS: dict[str, Any] = {
    "id": ID,
    "runId": RUN_ID,
    "name": "deposits",
    "timestamp": "2026-11-25T10:59:42.856Z",
    "batchId": 1,
    "batchDuration": 184,
    "numInputRows": 1000,
    "inputRowsPerSecond": 189.4,
    "processedRowsPerSecond": 5434.8,
    "durationMs": {
        "addBatch": 147,
        "commitOffsets": 2,
        "getBatch": 1,
        "latestOffset": 8,
        "queryPlanning": 19,
        "triggerExecution": 184,
        "walCommit": 4,
    },
    "stateOperators": [],
    "sources": [
        {
            "description": "KafkaV2[Subscribe[in]]",
            "startOffset": {"in": {"0": 240, "1": 280, "2": 200, "3": 280}},
            "endOffset": {"in": {"0": 480, "1": 560, "2": 400, "3": 560}},
            "latestOffset": {"in": {"0": 600, "1": 700, "2": 500, "3": 700}},
            "numInputRows": 1000,
            "inputRowsPerSecond": 189.4,
            "processedRowsPerSecond": 5434.8,
            "metrics": {
                "avgOffsetsBehindLatest": "125.0",
                "maxOffsetsBehindLatest": "140",
                "minOffsetsBehindLatest": "100",
            },
        }
    ],
    "sink": {"description": "ForeachBatchSink", "numOutputRows": -1},
}


def reports_of_two_batches() -> ProgressReports:
    """With the numbers of Spark's."""
    reports = ProgressReports(ID, RUN_ID, "deposits")
    second_ms = 1795604382856
    first = BatchSummary(0, 1000, records=1000, seconds={"write": 3.547})
    second = BatchSummary(1, 1000, records=990, seconds={"begin": 0.001, "write": 0.1365, "end": 0.01})
    reports.committed(
        first, SourceRange(AT_0, AT_240), AT_END, {"in": 1000}, started_ms=second_ms - 5280, duration_s=5.269
    )
    reports.committed(
        second,
        SourceRange(AT_240, AT_480),
        AT_END,
        {"in": 1000},
        started_ms=second_ms,
        duration_s=0.184,
        fetch_s=0.0009,
    )
    return reports


def as_json(report: Any) -> dict[str, Any]:
    """A report is a dict in Spark 3.5; later it knows the JSON that it was made of."""
    return dict(json.loads(report.json)) if isinstance(report, StreamingQueryProgress) else dict(report)


def test_the_numbers_of_spark_give_its_report() -> None:
    report = as_json(reports_of_two_batches().last)
    assert set(report["durationMs"]) == set(SPARKS["durationMs"])
    assert {name: ms for name, ms in report["durationMs"].items() if ms} == {
        "addBatch": 148,
        "getBatch": 1,
        "triggerExecution": 184,
    }
    assert report["sink"] == {"description": "onceflow", "numOutputRows": 990}
    own = {"durationMs": None, "sink": None}
    sparks = {name: value for name, value in SPARKS.items() if name in report}
    assert set(SPARKS) - set(sparks) == (set() if SPARK_4 else {"batchDuration"})
    assert {**report, **own} == {**sparks, **own}
    assert list(report) == list(sparks), "in the order of Spark's"


def test_they_have_the_type_of_this_version_of_spark() -> None:
    report = reports_of_two_batches().last
    assert type(report) is (StreamingQueryProgress if SPARK_4 else dict)
    offsets: Any = report["sources"][0]["endOffset"]
    assert (json.loads(offsets) if SPARK_4 else offsets) == {"in": {"0": 480, "1": 560, "2": 400, "3": 560}}
    assert report["id"] == ID
    assert report["runId"] == RUN_ID
    assert report["sources"][0]["numInputRows"] == report["numInputRows"] == 1000
    assert json.loads(json.dumps(as_json(report))) == as_json(report)


def test_the_first_batch_has_no_rate_of_its_input() -> None:
    reports = reports_of_two_batches()
    first, last = map(as_json, reports.recent)
    assert (first["batchId"], last["batchId"]) == (0, 1)
    assert first["inputRowsPerSecond"] == first["sources"][0]["inputRowsPerSecond"] == 0.0
    assert first["processedRowsPerSecond"] == 189.8
    assert reports.lag == {"in": {0: 120, 1: 140, 2: 100, 3: 140}}


def test_there_is_nothing_before_the_first_batch() -> None:
    reports = ProgressReports(ID, RUN_ID, None)
    assert reports.last is None
    assert reports.recent == []
    assert reports.lag == {}


def test_the_last_100_are_kept() -> None:
    reports = ProgressReports(ID, RUN_ID, None)
    for number in range(105):
        reports.committed(BatchSummary(number, 0), SourceRange({}, {}), {}, {}, started_ms=number, duration_s=0.0)
    assert [report["batchId"] for report in reports.recent] == list(range(5, 105))


def test_sources_that_are_new_or_quiet() -> None:
    """A source without rows, one that Spark would not have asked, and a partition that was added while it ran."""
    reports = ProgressReports(ID, RUN_ID, None)
    source = SourceRange({"quiet": {0: 5}, "grown": {0: 2}}, {"quiet": {0: 5}, "grown": {0: 3, 1: 4}, "new": {0: 1}})
    reports.committed(
        BatchSummary(7, 6),
        source,
        {"grown": {0: 3, 1: 9}},
        {"grown": 5, "new": 1},
        started_ms=0,
        duration_s=0.0,
    )
    report = as_json(reports.last)
    quiet, grown, new = report["sources"]
    assert (report["numInputRows"], quiet["numInputRows"], grown["numInputRows"], new["numInputRows"]) == (6, 0, 5, 1)
    assert report["processedRowsPerSecond"] == 6000.0, "of a batch that took no millisecond"
    assert quiet["startOffset"] == quiet["endOffset"] == quiet["latestOffset"] == {"quiet": {"0": 5}}
    assert quiet["metrics"]["maxOffsetsBehindLatest"] == new["metrics"]["maxOffsetsBehindLatest"] == "0"
    assert grown["metrics"] == {
        "avgOffsetsBehindLatest": "2.5",
        "maxOffsetsBehindLatest": "5",
        "minOffsetsBehindLatest": "0",
    }
    assert new["startOffset"] is None
    assert report["timestamp"] == "1970-01-01T00:00:00.000Z"
