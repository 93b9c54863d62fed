"""Starts Spark's JVM. Meanwhile Python would only wait, so it imports modules that a start needs anyway.

Together these imports take more than a second; pyspark makes some of them at its first calls of the JVM. They are made
by the thread that starts a session, and the JVM is started by another one: two threads that import modules of pyspark
could each wait for the other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Mapping

from pyspark import SparkConf, SparkContext

from onceflow.spark import jvm_options, versions

_MODULES = ("onceflow.flow", "onceflow.spark.row_program")
# From Spark 4 on, pyspark imports these itself. It asks pyspark.testing.utils, which imports pandas, about every
# argument of a call, and IPython and ipykernel for the line of user code that has made a column. With Spark 3.5 it does
# not, and the first one would import pandas-on-Spark, which changes how pyarrow treats time zones.
_MODULES_OF_SPARK_4 = ("pyspark.testing.utils", "IPython", "ipykernel")

_LAUNCHER = "SPARK_LAUNCHER_OPTS"


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

    launcher = os.environ.get(_LAUNCHER)
    os.environ.setdefault(_LAUNCHER, jvm_options.LAUNCHER)
    thread = threading.Thread(target=start, daemon=True, name="onceflow-jvm")
    thread.start()
    for name in (*_MODULES, *(_MODULES_OF_SPARK_4 if versions.has("classic") else ())):
        # It may not be installed, or be broken. Whoever needs it says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    thread.join()
    if launcher is None:
        os.environ.pop(_LAUNCHER, None)  # it is for no other process that this one may start
    if problems:
        raise problems[0]
