"""What a driver says of itself and its flows, as JSON: for ``onceflow status --endpoint``."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from onceflow._version import __version__
from onceflow.metrics.watch import FlowWatch, WatchedQuery

#: By this a client knows whose document it is.
SERVICE = "onceflow"
_COUNTS = ("batches_committed", "attempts_aborted", "batches_lost", "dead_letters", "late_records", "duplicates")


def driver_document(watch: FlowWatch) -> dict[str, Any]:
    """The flows of this process. It has no text of an error, because texts may contain parts of records, and the
    endpoint has no login."""
    conditions, lags = watch.conditions(), watch.lags()
    return {
        "service": SERVICE,
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "flows": [
            _flow(query, conditions.get(flow, ""), lags.get(flow), watch.counts.of_flow(flow, _COUNTS))
            for flow, query in watch.queries()
        ],
    }


def _flow(
    query: WatchedQuery,
    condition: str,
    lag: Mapping[str, Mapping[int, int]] | None,
    counts: Mapping[str, float],
) -> dict[str, Any]:
    done, batches = query.progress, query.batches
    failure = query.failure
    return {
        "flow": done.flow,
        "condition": condition,
        "since_ms": query.since_ms,
        "guarantee": query.guarantee,
        "batch": done.batch_id,
        "producer_id": done.producer_id,
        "producer_epoch": done.producer_epoch,
        "failure": None if failure is None else type(failure).__name__,
        "lag": None if lag is None else sum(sum(left.values()) for left in lag.values()),
        "last_batch": _last(batches),
        "counts": {name: int(count) for name, count in counts.items()},
        "tables": [asdict(table) for table in query.tables],
    }


def _last(batches: Sequence[Any]) -> dict[str, Any] | None:
    """The last batch of this run."""
    if not batches:
        return None
    last = batches[-1]
    return {
        "read": sum(last.read.values()),
        "records": last.records,
        "attempts": last.attempts,
        "seconds": round(sum(last.seconds.values()), 3),
        "ran_in": last.path,
    }
