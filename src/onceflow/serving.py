"""``serve``: runs queries as a service, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from onceflow.errors import OptionError
from onceflow.flow_writer import FlowWriter
from onceflow.interactive import is_interactive
from onceflow.metrics.endpoint import serve_metrics
from onceflow.planning.options import AT_MOST_ONCE, BatchSummary
from onceflow.query import FlowQuery

_LOOK_EVERY_S = 0.1
_REPEATED_S = 1.0  # signals that come together are one
_BATCH_S = 60.0  # how long a running batch may take to finish, if it must not be aborted


def serve(
    *queries: FlowQuery | FlowWriter,
    more: Callable[[FlowQuery], dict[str, Any]] | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> None:
    """Run queries until SIGTERM or Ctrl-C, or until one of them ends. Then stop all of them gracefully.

    A query whose reads have reached their ``until`` ends without ending the others; ``serve`` returns when all have.

    A batch that is running then is aborted, and the next start runs it again. (With ``at_most_once``, the batch gets a
    minute to finish.) Call ``serve`` in the main thread, because only this thread can handle signals. A second signal
    within a second is ignored, because it often comes with the first one: ``timeout`` signals both a process and its
    group. A later one ends the process at once, with exit code 143 (SIGTERM) or 130 (Ctrl-C); the next start continues
    as after a crash. In a notebook it raises KeyboardInterrupt instead.

    For every committed batch, ``serve`` prints a line of JSON to stdout: ``flow``, ``batch`` (its number), ``records``
    (written to the outputs), ``dead_letters``, ``late`` (late records), ``duplicates`` (of ``Flow.deduplicate``),
    ``dropped`` (rows that Spark dropped because they were older than its watermark) and ``seconds`` (the sum over its
    steps); also ``state_lost`` if partitions without a changelog have lost their state. When a query starts or is being
    stopped, ``serve`` prints that to stderr.

    ::

        onceflow.serve(flow.write(rows, topic="validated", trigger="200 milliseconds").start())

    With ``metrics_port``, metrics for Prometheus and probes are served meanwhile (``serve_metrics``). If the port is in
    use, no query that is given without ``.start()`` is started, and those that run are stopped.

    Args:
        queries: what ``Flow.write(...)`` or ``Flow.write(...).start()`` returned. ``serve`` starts the former.
        more: a function that returns further fields for the line of a query. They must be valid in JSON.
        metrics_port: port of the metrics, for example 9404; 0: a free port; None: there are none.
        metrics_host: address to listen on; ``0.0.0.0``: all addresses of this machine.

    Raises:
        OnceflowError: a query has failed. ``serve`` shuts the others down gracefully and re-raises the failure.
        OptionError: no query was given, or this is not the main thread; ``metrics_port`` is no port.
        EnvironmentUnusableError: the address of the metrics is in use.
    """
    if not queries:
        raise OptionError("serve() was given no query", next_step="give it what Flow.write(...).start() returned")
    if threading.current_thread() is not threading.main_thread():
        raise OptionError(
            "serve() must run in the main thread: it handles SIGTERM and Ctrl-C",
            next_step="in another thread, wait with query.awaitTermination()",
        )
    running = [query for query in queries if not isinstance(query, FlowWriter)]
    try:
        with contextlib.ExitStack() as stack:
            if metrics_port is not None:
                endpoint = stack.enter_context(serve_metrics(metrics_port, metrics_host))
                print(f"onceflow: metrics at {endpoint.url}", file=sys.stderr, flush=True)
                for query in running:
                    endpoint.add(query)
            for writer in queries:
                if isinstance(writer, FlowWriter):
                    running.append(writer.start())
            _run(running, more)
    finally:
        for query in running:
            if query.isActive:
                query.stop()


def _run(queries: Sequence[FlowQuery], more: Callable[[FlowQuery], dict[str, Any]] | None) -> None:
    """Run until a signal, or until a query ends."""
    told = dict.fromkeys(queries, 0)

    def tell() -> None:
        for query in queries:
            for batch in query.batches:
                if batch.batch > told[query]:
                    told[query] = batch.batch
                    line = _line(query, batch) | ({} if more is None else more(query))
                    print(json.dumps(line), flush=True)

    stop = _Stop()
    with stop as asked, contextlib.ExitStack() as stack:
        for query in queries:
            stack.enter_context(query.awaited())
            print(f"onceflow: flow {query.flow} runs; SIGTERM or Ctrl-C stops it", file=sys.stderr, flush=True)
        while not _is_over(queries) and not asked.wait(_LOOK_EVERY_S):
            tell()
        # A signal to the group has ended Spark's JVM as well. That is a stop, too, and no failure of the query.
        ended = [query for query in queries if not query.isActive and not (asked.is_set() and not query.failure)]
        for query in queries:
            if asked.is_set() and query.isActive:
                print(f"onceflow: flow {query.flow} is being stopped", file=sys.stderr, flush=True)
            _end(query)
        tell()
    for query in ended:
        query.awaitTermination()  # raises the error for which the query has stopped


def _is_over(queries: Sequence[FlowQuery]) -> bool:
    """Whether a query has ended. Those that have reached the end of their reads do not end the others."""
    ended = [query for query in queries if not query.isActive]
    return len(ended) == len(queries) or not all(query.is_complete for query in ended)


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


class _Stop:
    """Yields an event that SIGTERM and Ctrl-C set; and says what further signals do."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> threading.Event:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self._asked

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # The second signal of a pair may arrive when everything is stopped already.
            signal.signal(number, self._late if self._asked.is_set() else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self._asked.is_set():
            self._asked_at = time.monotonic()
            self._asked.set()
        elif not self._is_repeated():
            _end_at_once(number)

    def _late(self, number: int, frame: FrameType | None) -> None:
        if self._is_repeated():
            return
        for each, handler in self._before.items():
            if signal.getsignal(each) == self._late:  # not one that was set since then
                signal.signal(each, handler)
        signal.raise_signal(number)

    def _is_repeated(self) -> bool:
        return time.monotonic() - self._asked_at < _REPEATED_S


def _end_at_once(number: int) -> None:
    """End the process without waiting for anything. Its batch is aborted by the next start, as after a crash."""
    if is_interactive():  # the notebook must survive
        raise KeyboardInterrupt
    # The process may be in the middle of a print, so this does not use the buffers of sys.stderr.
    os.write(2, b"onceflow: ended before everything was stopped; the next start continues as after a crash\n")
    os._exit(128 + number)
