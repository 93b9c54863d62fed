"""Where Spark runs tasks, and how many at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from pyspark.sql import SparkSession

# With dynamic allocation, plan for so many times the current cores. Without waiting tasks Spark would never add any.
_GROWTH = 4


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run on this machine."""
    return re.match(r"local(\[|$)", str(spark.sparkContext.master)) is not None


def local_cores(master: str) -> int | None:
    """How many tasks a local master runs at a time; None when the master is not local."""
    match = re.fullmatch(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?", master)
    if match is None:
        return None
    if match[1] == "*":
        return os.cpu_count() or 1
    return int(match[1] or 1)


def current_cores(spark: SparkSession) -> Callable[[], int]:
    """A function that returns how many tasks Spark can run at once. The number changes, as executors come and go."""
    context = spark.sparkContext
    # Not with SparkContext.getConf, which copies every setting from the JVM, one by one.
    grows = str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"

    def cores() -> int:
        return context.defaultParallelism * (_GROWTH if grows else 1)

    return cores
