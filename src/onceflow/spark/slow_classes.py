"""Classes of Spark that take long when they are used for the first time."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.jvm import SPARK_ERRORS

# From Spark 4 on, upper() and lower() need a table of all characters, which takes a second to make.
_CASES = "org.apache.spark.sql.catalyst.util.CollationAwareUTF8String"
_CASES_PATTERN = "UPPER_OR_LOWER"


def initialize_ahead(make: JavaFunctions, plan: Any) -> None:
    """Initialize those that a plan is going to use in a thread, while it is optimized and planned."""
    if plan.containsPattern(make.tree_pattern(_CASES_PATTERN)):
        loader = make.java_class("org.apache.spark.sql.SparkSession").getClassLoader()
        threading.Thread(target=_initialize, args=(make, loader), daemon=True, name="onceflow-classes").start()


def _initialize(make: JavaFunctions, loader: Any) -> None:
    with contextlib.suppress(*SPARK_ERRORS, OSError):  # Spark 3.5 has no such class
        make.static("java.lang.Class").forName(_CASES, True, loader)
