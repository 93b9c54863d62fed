"""The log output of Spark's JVM and of py4j when a flow fails: one line on the console, everything in a file.

The error itself comes from onceflow: it is raised where the program waits for the query, or logged once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext

from onceflow.errors import OnceflowError
from onceflow.host.java import with_flags
from onceflow.host.leftovers import of_ended_processes
from onceflow.host.private_folders import scratch_folder
from onceflow.spark import versions

log = logging.getLogger("onceflow.spark")

# The loggers that py4j uses.
_LOGGERS = (logging.root, logging.getLogger("py4j.clientserver"), logging.getLogger("py4j.java_gateway"))

# PySpark 4 logs each error of a query here, as JSON with the stack traces of the JVM, before it raises it.
_CONTEXT_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")

_BROKEN = (Py4JNetworkError, OSError, EOFError)  # a ConnectionError is an OSError

_SETTINGS = Path(__file__).with_name("log4j2.properties")
_PREFIX = "onceflow-spark-pid"


def with_settings(options: str, spark_conf: Path, level: str = "WARN") -> str:
    """JVM options with onceflow's log4j settings, unless the user has chosen some.

    Args:
        options: JVM options of the driver. spark_conf: Spark's configuration folder.
        level: the value of ``spark.log.level``. Spark 4 applies it itself when its context starts, Spark 3.5 does not
            know it.
    """
    chosen = "log4j" in options or "log4j" in os.environ.get("JDK_JAVA_OPTIONS", "")
    if chosen or any(spark_conf.glob("log4j*")):
        return options
    flags = [f"-Dlog4j2.configurationFile={_SETTINGS}", f"-Donceflow.spark.log={log_file()}"]
    if not versions.has("log level setting"):
        flags.append(f"-Donceflow.spark.log.level={level.lower()}")
    return with_flags(options, flags)


def log_file() -> Path:
    """Where the JVM of this process writes its log. Old logs of processes that have ended are removed."""
    folder = scratch_folder()
    for old in of_ended_processes(_PREFIX, r"\.log(\.1)?", folder):
        if _is_old(old):
            old.unlink(missing_ok=True)
    return folder / f"{_PREFIX}{os.getpid()}.log"


def _is_old(file: Path) -> bool:
    """Whether the last line of a log is more than a day old."""
    try:
        return time.time() - file.stat().st_mtime > 86_400
    except OSError:
        return False


class _NotOfFlows(logging.Filter):
    """Drops messages of py4j about errors of onceflow, and about Ctrl-C: the user gets these in another way."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OnceflowError):
            return False
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        return error is None


def silence_py4j() -> None:
    """Drop these messages. py4j logs every error of a callback with its traceback, also those of foreachBatch, and each
    connection that breaks when the JVM ends: who asks the JVM gets an error that says so."""
    logger = logging.getLogger("py4j.clientserver")
    if not any(isinstance(each, _NotOfFlows) for each in logger.filters):
        logger.addFilter(_NotOfFlows())
    for logger in _LOGGERS:
        if _not_of_a_broken_connection not in logger.filters:
            logger.addFilter(_not_of_a_broken_connection)
    with suppress(ImportError):  # Spark 3.5 has no such loggers
        from pyspark.logger import PySparkLogger

        for name in _CONTEXT_LOGGERS:
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    server = getattr(SparkContext._active_spark_context, "_accumulatorServer", None)
    if server is not None and "handle_error" not in vars(server):
        others = server.handle_error

        def handle_error(*about: object) -> None:
            if isinstance(sys.exc_info()[1], _BROKEN):
                log.debug("an accumulator was not updated", exc_info=True)
            else:
                others(*about)

        server.handle_error = handle_error


def _not_of_a_broken_connection(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if _not_by_py4j(record) or not isinstance(error, _BROKEN):
        return True
    log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    return False


def _not_by_py4j(record: logging.LogRecord) -> bool:
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def mute_connections() -> None:
    """Call this when a signal asks the process to end. It may end Spark's JVM, too, and before the process: py4j and
    PySpark's server of accumulators would print a traceback for each connection that breaks
    (``accumulators.UpdateRequestHandler``). It is called in a signal handler, so it waits for no lock.
    """
    for logger in _LOGGERS:
        if _not_by_py4j not in logger.filters:
            logger.addFilter(_not_by_py4j)
    server = getattr(SparkContext._active_spark_context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: log.debug("an accumulator was not updated", exc_info=True)
