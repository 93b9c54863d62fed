"""Reports of batches that Spark has not run, as PySpark's ``StreamingQuery`` returns those of Spark's."""

from __future__ import annotations

import collections
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql.streaming.listener import StreamingQueryProgress

Offsets = Mapping[str, Mapping[int, int]]

_KEPT = 100  # as Spark does (spark.sql.streaming.numRecentProgressUpdates)


class Summary(Protocol):
    """What is known of a committed batch (`onceflow.planning.options.BatchSummary`)."""

    @property
    def batch(self) -> int:
        """Its number."""
        ...

    @property
    def records(self) -> int:
        """How many records were written to the outputs."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each step."""
        ...


class Range(Protocol):
    """What a batch has read (`onceflow.driver.record.offset_log.SourceRange`)."""

    @property
    def start(self) -> Offsets:
        """Where it begins, by topic and partition."""
        ...

    @property
    def end(self) -> Offsets:
        """Where the next batch begins."""
        ...


@dataclass(frozen=True)
class _Batch:
    """One batch. ``since_last_ms`` is None for the first one."""

    summary: Summary
    source: Range
    latest: Offsets
    rows: Mapping[str, int]
    started_ms: int
    duration_ms: int
    fetch_ms: int
    since_last_ms: int | None


class ProgressReports:
    """The reports of the last 100 batches of a query. They are made when they are asked for, in any thread.

    Args:
        query_id, run_id: UUIDs.
        name: of the query.
    """

    def __init__(self, query_id: str, run_id: str, name: str | None) -> None:
        self._query = {"id": query_id, "runId": run_id, "name": name}
        self._batches: collections.deque[_Batch] = collections.deque(maxlen=_KEPT)

    def committed(
        self,
        summary: Summary,
        source: Range,
        latest: Offsets,
        rows: Mapping[str, int],
        *,
        started_ms: int,
        duration_s: float,
        fetch_s: float = 0.0,
    ) -> None:
        """A batch is committed. Call this in one thread.

        Args:
            latest: the ends of the sources, as they were known when the batch was planned.
            rows: how many rows of each topic it has read.
            started_ms: when it was begun, epoch milliseconds.
            duration_s: how long it took, with ``fetch_s``.
            fetch_s: how long it took to get the rows.
        """
        before = self._batches[-1].started_ms if self._batches else None
        self._batches.append(
            _Batch(
                summary=summary,
                source=source,
                latest=latest,
                rows=rows,
                started_ms=started_ms,
                duration_ms=_ms(duration_s),
                fetch_ms=_ms(fetch_s),
                since_last_ms=None if before is None else started_ms - before,
            )
        )

    @property
    def last(self) -> Any:
        """The last report: a dict, since Spark 4 a ``StreamingQueryProgress``. None if there was no batch."""
        batches = list(self._batches)
        return self._report(batches[-1]) if batches else None

    @property
    def recent(self) -> list[Any]:
        """The last reports, the newest at the end."""
        return [self._report(batch) for batch in list(self._batches)]

    @property
    def lag(self) -> dict[str, dict[int, int]]:
        """How many offsets of each source partition the last batch has left, by topic. Empty if there was no batch."""
        batches = list(self._batches)
        return left(batches[-1].source.end, batches[-1].latest) if batches else {}

    def _report(self, batch: _Batch) -> Any:
        fields = {**self._query, **_fields(batch)}
        if not issubclass(StreamingQueryProgress, dict):
            del fields["batchDuration"]  # it is new in Spark 4
            return fields
        report = StreamingQueryProgress.fromJson(fields)
        for source, given in zip(report.sources, fields["sources"], strict=True):
            for name in ("startOffset", "endOffset", "latestOffset"):
                source[name] = json.dumps(given[name], separators=(",", ":"))  # Spark 4.0 makes a text of Python
        return report


def left(end: Offsets, latest: Offsets) -> dict[str, dict[int, int]]:
    """How many offsets are between both in each partition, by topic."""
    found = {}
    for topic, partitions in latest.items():
        read = end.get(topic, {})
        found[topic] = {number: max(0, last - read.get(number, last)) for number, last in partitions.items()}
    return found


def _fields(batch: _Batch) -> dict[str, Any]:
    """The report as JSON, apart from the query."""
    summary = batch.summary
    return {
        "timestamp": _timestamp(batch.started_ms),
        "batchId": summary.batch,
        "batchDuration": batch.duration_ms,
        "numInputRows": sum(batch.rows.values()),
        **_rates(sum(batch.rows.values()), batch),
        "durationMs": {
            "addBatch": _ms(sum(summary.seconds.values())),
            "commitOffsets": 0,  # a batch commits them itself
            "getBatch": batch.fetch_ms,
            "latestOffset": 0,
            "queryPlanning": 0,
            "triggerExecution": batch.duration_ms,
            "walCommit": 0,
        },
        "stateOperators": [],
        "sources": [_source(topic, batch) for topic in batch.source.end],
        "sink": {"description": "onceflow", "numOutputRows": summary.records},
    }


def _source(topic: str, batch: _Batch) -> dict[str, Any]:
    rows = batch.rows.get(topic, 0)
    start, end = batch.source.start.get(topic), batch.source.end[topic]
    latest = batch.latest.get(topic, end)
    behind = list(left({topic: end}, {topic: latest})[topic].values()) or [0]
    return {
        "description": f"KafkaV2[Subscribe[{topic}]]",
        "startOffset": None if start is None else _offsets(topic, start),
        "endOffset": _offsets(topic, end),
        "latestOffset": _offsets(topic, latest),
        "numInputRows": rows,
        **_rates(rows, batch),
        "metrics": {
            "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
            "maxOffsetsBehindLatest": str(max(behind)),
            "minOffsetsBehindLatest": str(min(behind)),
        },
    }


def _rates(rows: int, batch: _Batch) -> dict[str, float]:
    """Rows per second. A batch of less than a millisecond counts as one of a millisecond."""
    since_ms = batch.since_last_ms
    return {
        "inputRowsPerSecond": 0.0 if since_ms is None else round(1000 * rows / max(1, since_ms), 1),
        "processedRowsPerSecond": round(1000 * rows / max(1, batch.duration_ms), 1),
    }


def _offsets(topic: str, partitions: Mapping[int, int]) -> dict[str, dict[str, int]]:
    return {topic: {str(number): offset for number, offset in sorted(partitions.items())}}


def _timestamp(ms: int) -> str:
    at = datetime.datetime.fromtimestamp(ms / 1000, datetime.timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
