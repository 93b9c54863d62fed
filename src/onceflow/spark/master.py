"""Where Spark runs tasks."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run on this machine."""
    return re.match(r"local(\[|$)", str(spark.sparkContext.master)) is not None
