"""The JVM of this process: whether it runs, its settings, its classes. None of this needs a SparkSession."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark.jvm import has_class


def has_context() -> bool:
    """Whether this process has a SparkContext."""
    return SparkContext._active_spark_context is not None


def is_started() -> bool:
    """Whether the JVM runs. It may be ``spark-submit`` that has started it, before this process."""
    return SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ


def started() -> None:
    """Connect to the JVM that `is_started`."""
    SparkContext._ensure_initialized()


def cannot_answer(error: BaseException) -> bool:
    """Whether py4j fails so if the JVM has ended. (User code that connects to something may fail like this, too.)"""
    return isinstance(error, (Py4JNetworkError, ConnectionError)) or type(error) is Py4JError


def ended_error(error: BaseException) -> EnvironmentUnusableError:
    """What to say of the end of the JVM, in place of py4j's error."""
    return EnvironmentUnusableError(
        "Spark's JVM has ended, and the query with it",
        detail=str(error),
        next_step="start the driver again: the flow continues where its progress ends. If it repeats, check "
        "whether the kernel killed the JVM (dmesg), and set spark.driver.memory to a value that fits",
    )


def ended(spark: SparkSession, error: BaseException) -> EnvironmentUnusableError | None:
    """`ended_error`, if an error is because the JVM has ended: it does not answer any more."""
    if not cannot_answer(error):
        return None
    gateway: Any = spark.sparkContext._gateway
    try:
        JavaClass("java.lang.System", gateway._gateway_client).nanoTime()
    except (Py4JError, ConnectionError):
        return ended_error(error)
    return None


def settings() -> dict[str, str]:
    """The settings in a new ``SparkConf`` of the JVM: system properties, arguments of ``spark-submit``."""
    java: Any = SparkContext._jvm
    return {pair._1(): pair._2() for pair in java.org.apache.spark.SparkConf().getAll()}


def process_id() -> int:
    """Process id of the JVM that this process has started."""
    gateway: Any = SparkContext._gateway
    return int(gateway.proc.pid)


def can_load(name: str) -> bool:
    """Whether the JVM has a class on its class path."""
    return has_class(SparkContext._jvm, name)


def spark_home() -> Path:
    """Spark's folder: ``$SPARK_HOME``, or that of the installed pyspark."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())
