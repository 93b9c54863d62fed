"""``serve``: runs queries as a service, until SIGTERM, Ctrl-C or SIGHUP."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TextIO

from onceflow import uncaught
from onceflow.errors import OptionError
from onceflow.interactive import is_interactive
from onceflow.logs import json_logs, log_context
from onceflow.metrics.endpoint import MetricsEndpoint, serve_metrics
from onceflow.metrics.lineage import Lineage
from onceflow.metrics.telemetry import Telemetry
from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import option_seconds
from onceflow.planning.options import AT_MOST_ONCE, BatchSummary
from onceflow.query import FlowQuery, FlowWriter
from onceflow.service.stop_signals import StopSignals, in_main_thread
from onceflow.spark.logs import mute_connections

log = logging.getLogger("onceflow.serve")

_LOOK_EVERY_S = 0.1
_CLOSE_S = 10.0  # of the time for a stop: to close everything, after a batch that must not be aborted


class _Say(Protocol):
    def __call__(self, text: str, flow: str | None = None) -> None:
        """Tell people what happens, and to which flow."""


@checked_arguments
def serve(
    *queries: FlowQuery | FlowWriter,
    more: Callable[[FlowQuery], dict[str, Any]] | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    stop_timeout: str | float = "1 minute",
    log_format: str | None = None,
    telemetry: bool = False,
    lineage: bool = False,
) -> None:
    """Run queries until SIGTERM, Ctrl-C or SIGHUP, or until one of them ends. Then stop all of them gracefully.

    A query whose reads have reached their ``until`` ends without ending the others; ``serve`` returns when all have.

    A batch that is running then is aborted, and the next start runs it again. (With ``at_most_once``, the batch may
    finish, up to 10 seconds before the end of ``stop_timeout``.) A second signal within a second is ignored, because it
    often comes with the first one: ``timeout`` signals both a process and its group. A later one ends the process at
    once, with exit code 143 (SIGTERM), 130 (Ctrl-C) or 129 (SIGHUP); the next start continues as after a crash. So does
    ``stop_timeout``. A supervisor should wait longer: Kubernetes (``terminationGracePeriodSeconds``) waits 30 seconds
    by default. SIGHUP is ignored under ``nohup``.

    In a notebook, interrupting the kernel stops the queries. There is no limit then, and a second interrupt raises
    KeyboardInterrupt. In another thread than the main one, which gets no signals, ``serve`` runs until a query ends:
    ``query.stop()`` ends it.

    For every committed batch, ``serve`` prints a line of JSON to stdout: ``flow``, ``batch`` (its number), ``read``
    (offsets of the sources; transaction markers count, too), ``records`` (written to the outputs), ``dead_letters``,
    ``late`` (late records), ``duplicates`` (of ``Flow.deduplicate``), ``dropped`` (rows that Spark dropped because they
    were older than its watermark) and ``seconds`` (the sum over its steps); also ``state_lost`` if partitions without a
    changelog have lost their state. When a query starts or is being stopped, ``serve`` prints that to stderr: at a
    start also who was fenced, where the flow resumes and how it writes, unless the logger ``onceflow`` writes this,
    because it is at INFO.

    ::

        onceflow.serve(flow.write(rows, topic="validated", trigger="200 milliseconds").start())

    With ``metrics_port``, metrics for Prometheus and probes are served meanwhile (``serve_metrics``). If the port is in
    use, no query that is given without ``.start()`` is started, and those that run are stopped.

    Args:
        queries: what ``Flow.write(...)`` or ``Flow.write(...).start()`` returned. ``serve`` starts the former.
        more: a function that returns further fields for the line of a query. They must be valid in JSON.
        metrics_port: port of the metrics; 0: a free port; None: there are none.
        metrics_host: address to listen on; ``0.0.0.0``: all addresses.
        stop_timeout: how long a stop may take, from the first signal on.
        log_format: ``json`` (see `JsonLogFormatter`) or ``text``; None: what ``$ONCEFLOW_LOG_FORMAT`` says, else
            ``text``.
        telemetry: report metrics and a span for each batch to OpenTelemetry, see `Telemetry`.
        lineage: send OpenLineage events, see `Lineage`.

    Raises:
        OnceflowError: a query has failed. ``serve`` shuts the others down gracefully and re-raises the failure. If it
            is a FencedError and nobody catches it, the program ends with exit code 79 in place of 1.
        OptionError: no query was given; ``metrics_port`` is no port; ``stop_timeout``
            is no duration of at least a second; ``log_format`` is unknown.
        EnvironmentUnusableError: the address of the metrics is in use, or a package is missing for what was asked for.
    """
    if not queries:
        raise OptionError("serve() was given no query", next_step="give it what Flow.write(...).start() returned")
    running = [query for query in queries if not isinstance(query, FlowWriter)]
    signals = StopSignals(option_seconds(stop_timeout, "stop_timeout", None), partial(_stop_is_asked, running))
    say: _Say = _say_in_json if json_logs.use(log_format) else partial(_say, signals)
    try:
        with uncaught.fenced_ends_program(), contextlib.ExitStack() as stack:
            watching: list[MetricsEndpoint | Telemetry | Lineage] = []
            if metrics_port is not None:
                endpoint = stack.enter_context(serve_metrics(metrics_port, metrics_host))
                say(f"metrics at {endpoint.url}")
                watching.append(endpoint)
            if telemetry:
                watching.append(stack.enter_context(Telemetry()))
            if lineage:
                events = Lineage()
                stack.callback(lambda: events.close(signals.left_s))
                watching.append(events)
            stack.callback(_stop, running)  # before those who watch close, so that they learn how it ends
            for query in running:
                for each in watching:
                    each.add(query)
            for writer in queries:
                if isinstance(writer, FlowWriter):
                    running.append(writer.start())
            _run(running, more, signals, say)
    finally:
        _stop(running)


def _stop(running: Sequence[FlowQuery]) -> None:
    for query in running:
        if query.isActive:
            query.stop()


def _stop_is_asked(running: Sequence[FlowQuery]) -> None:
    for query in running:
        query.stop_is_asked()
    if not is_interactive():  # a notebook goes on
        mute_connections()


def _run(
    queries: Sequence[FlowQuery],
    more: Callable[[FlowQuery], dict[str, Any]] | None,
    signals: StopSignals,
    say: _Say,
) -> None:
    """Run until a signal, or until a query ends."""
    logged = dict.fromkeys(queries, 0)

    def tell() -> None:
        for query in queries:
            for batch in query.batches:
                if batch.batch > logged[query]:
                    logged[query] = batch.batch
                    line = _line(query, batch) | ({} if more is None else more(query))
                    _print(json.dumps(line), sys.stdout, signals)

    how = "query.stop()" if not in_main_thread() else "interrupting" if is_interactive() else "SIGTERM or Ctrl-C"
    with signals, contextlib.ExitStack() as stack:
        for query in queries:
            stack.enter_context(query.awaited())
            query.log_start()  # log lines may be JSON only since now
            for line in query.untold_start():
                say(line, query.flow)
            runs = "has ended already" if query.is_over else f"runs; {how} stops it"
            say(f"flow {query.flow} {runs}", query.flow)
        while not _is_over(queries) and not signals.wait(_LOOK_EVERY_S):
            tell()
        # A signal to the group has ended Spark's JVM as well. That is a stop, too, and no failure of the query.
        ended = [query for query in queries if not query.isActive and not (signals.asked and not query.failure)]
        for query in queries:
            if signals.asked and query.isActive:
                say(f"flow {query.flow} is being stopped", query.flow)
            _end(query, signals)
        tell()
    for query in ended:
        query.awaitTermination()  # raises the error for which the query has stopped


def _is_over(queries: Sequence[FlowQuery]) -> bool:
    """Whether a query has ended. Those that have reached the end of their reads do not end the others."""
    ended = [query for query in queries if not query.isActive]
    return len(ended) == len(queries) or not all(query.is_complete for query in ended)


def _say(signals: StopSignals, text: str, flow: str | None = None) -> None:
    _print(f"onceflow: {text}", sys.stderr, signals)


def _say_in_json(text: str, flow: str | None = None) -> None:
    with log_context.within(flow=flow):
        log.info("%s", text)


def _print(line: str, file: TextIO, signals: StopSignals) -> None:
    """Print a line at once. After SIGHUP the terminal is gone, which is no reason not to stop gracefully."""
    try:
        print(line, file=file, flush=True)
    except OSError:
        if not signals.asked:
            raise
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # or Python fails to flush it at its end


def _line(query: FlowQuery, batch: BatchSummary) -> dict[str, Any]:
    seconds = round(sum(batch.seconds.values()), 3)
    return {
        "flow": query.flow,
        "batch": batch.batch,
        "read": sum(batch.read.values()),
        "records": batch.records,
        "dead_letters": batch.dead_letters,
        "late": batch.late,
        "duplicates": batch.duplicates,
        "dropped": batch.dropped,
        "seconds": seconds,
        **({"state_lost": batch.state_lost} if batch.state_lost else {}),
    }


def _end(query: FlowQuery, signals: StopSignals) -> None:
    if not query.isActive:
        if signals.asked:
            query.stopped_with_spark()
        return
    # With at_most_once, progress is written before the rows: let the batch finish, so that this end loses no rows.
    query.stop(batch_s=max(0.0, signals.left_s - _CLOSE_S) if query.guarantee == AT_MOST_ONCE else 0.0)
