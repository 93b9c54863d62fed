"""``serve``: runs queries as a service, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from onceflow.errors import OptionError
from onceflow.planning.options import AT_MOST_ONCE, BatchSummary
from onceflow.query import FlowQuery

_LOOK_EVERY_S = 0.1
_BATCH_S = 60.0  # how long a running batch may take to finish, if it must not be aborted


def serve(*queries: FlowQuery, more: Callable[[FlowQuery], dict[str, Any]] | None = None) -> None:
    """Run queries until SIGTERM or Ctrl-C, or until one of them ends. Then stop all of them gracefully.

    A batch that is running then is aborted, and the next start runs it again. (With ``at_most_once``, the batch gets a
    minute to finish.) Call ``serve`` in the main thread, because only this thread can handle signals. A second signal
    interrupts at once.

    For every committed batch, ``serve`` prints a line of JSON to stdout: ``flow``, ``batch`` (its number), ``records``
    (written to the outputs), ``dead_letters``, ``late`` (late records), ``duplicates`` (of ``Flow.deduplicate``),
    ``dropped`` (rows that Spark dropped because they were older than its watermark) and ``seconds`` (the sum over its
    steps); also ``state_lost`` if partitions without a changelog have lost their state. When a query starts or is being
    stopped, ``serve`` prints that to stderr.

    ::

        onceflow.serve(flow.write(rows, topic="validated", trigger="200 milliseconds").start())

    Args:
        queries: what ``Flow.write(...).start()`` returned.
        more: a function that returns further fields for the line of a query. They must be valid in JSON.

    Raises:
        OnceflowError: a query has failed. ``serve`` shuts the others down gracefully and re-raises the failure.
        OptionError: no query was given, or this is not the main thread.
    """
    if not queries:
        raise OptionError("serve() was given no query", next_step="give it what Flow.write(...).start() returned")
    if threading.current_thread() is not threading.main_thread():
        raise OptionError(
            "serve() must run in the main thread: it handles SIGTERM and Ctrl-C",
            next_step="in another thread, wait with query.awaitTermination()",
        )
    told = dict.fromkeys(queries, 0)

    def tell() -> None:
        for query in queries:
            for batch in query.batches:
                if batch.batch > told[query]:
                    told[query] = batch.batch
                    line = _line(query, batch) | ({} if more is None else more(query))
                    print(json.dumps(line), flush=True)

    try:
        with _asked_to_stop() as asked, contextlib.ExitStack() as stack:
            for query in queries:
                stack.enter_context(query.awaited())
                print(f"onceflow: flow {query.flow} runs; SIGTERM or Ctrl-C stops it", file=sys.stderr, flush=True)
            while all(query.isActive for query in queries) and not asked.wait(_LOOK_EVERY_S):
                tell()
            ended = [query for query in queries if not query.isActive]
            for query in queries:
                if asked.is_set() and query.isActive:
                    print(f"onceflow: flow {query.flow} is being stopped", file=sys.stderr, flush=True)
                _end(query)
            tell()
        for query in ended:
            query.awaitTermination()  # raises the error for which the query has stopped
    finally:
        for query in queries:
            if query.isActive:
                query.stop()


def _line(query: FlowQuery, batch: BatchSummary) -> dict[str, Any]:
    seconds = round(sum(batch.seconds.values()), 3)
    return {
        "flow": query.flow,
        "batch": batch.batch,
        "records": batch.records,
        "dead_letters": batch.dead_letters,
        "late": batch.late,
        "duplicates": batch.duplicates,
        "dropped": batch.dropped,
        "seconds": seconds,
        **({"state_lost": batch.state_lost} if batch.state_lost else {}),
    }


def _end(query: FlowQuery) -> None:
    if not query.isActive:
        return
    # With at_most_once, progress is written before the rows: let the batch finish, so that this end loses no rows.
    query.stop(batch_s=_BATCH_S if query.guarantee == AT_MOST_ONCE else 0.0)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM and Ctrl-C set."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
