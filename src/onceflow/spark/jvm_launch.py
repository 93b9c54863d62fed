"""Starts Spark's JVM. Meanwhile Python would only wait, so it imports modules that a start needs anyway.

Together these imports take more than a second; pyspark makes some of them at its first calls of the JVM. They are made
by the thread that starts a session, and the JVM is started by another one: two threads that import modules of pyspark
could each wait for the other.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping

from pyspark import SparkConf, SparkContext

# pyspark.testing.utils imports pandas; Spark 4.2 asks it about every argument of a call. IPython: pyspark asks it for
# the line of user code that has made a column.
_MODULES = ("onceflow.flow", "onceflow.spark.row_program", "pyspark.testing.utils", "IPython")


def launch(settings: Mapping[str, str]) -> None:
    """Start the JVM of this process, which must not have one, with these settings.

    Raises:
        Exception: what ``SparkContext`` raises if it cannot be started.
    """
    conf = SparkConf().setAll(list(settings.items()))
    problems: list[BaseException] = []

    def start() -> None:
        try:
            SparkContext._ensure_initialized(conf=conf)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=start, daemon=True, name="onceflow-jvm")
    thread.start()
    for name in _MODULES:
        # It may not be installed, or be broken. Whoever needs it says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    thread.join()
    if problems:
        raise problems[0]
