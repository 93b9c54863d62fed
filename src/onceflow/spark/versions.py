"""The differences between the versions of Spark that onceflow runs on.

Other modules ask for a feature or a class by a name of this module, never for a version number.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

from onceflow.errors import EnvironmentUnusableError, UnsupportedQueryError
from onceflow.host.jars import SPARK_REQUIREMENT, installed_spark_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Version = tuple[int, int]

#: The minor versions of Spark that onceflow runs on; ``make test-spark SPARK=3.5`` tests one of them.
SUPPORTED: tuple[Version, ...] = ((3, 5), (4, 0), (4, 1), (4, 2))

# The first version that has a feature. For older versions, the code that asks for the feature has a fallback.
_SINCE: dict[str, Version] = {
    # org.apache.spark.sql.classic and pyspark.sql.classic: Spark 4 has a common API above classic and Connect.
    "classic": (4, 0),
    # StaticInvoke takes the function of a catalog as its ninth argument.
    "scalar function": (4, 0),
    # local_connect_and_auth is in pyspark.util; before, in pyspark.java_gateway.
    "socket in util": (4, 0),
    # A job that was cancelled has an error condition of its own; before, only a text.
    "cancel condition": (4, 0),
    # The setting spark.log.level.
    "log level setting": (4, 0),
    # The commit log can name the files of Spark's state (stateStore.checkpointFormatVersion 2).
    "state ids": (4, 0),
    # StreamExecution.getLatestExecutionContext; before, the plan is at lastExecution.
    "execution context": (4, 0),
    # DataFrame.repartitionById.
    "repartitionById": (4, 1),
    # Streaming classes are in packages by their purpose (runtime, checkpointing, operators.stateful).
    "streaming packages": (4, 1),
    # DataSourceRDDPartition has one optional input partition; before, a sequence.
    "one input partition": (4, 2),
    # A state store with ids that starts again at version 0 forgets the attempt before.
    "clean lineage": (4, 2),
    # CommitLog.createMetadata makes the entry, and the log knows a sink's metadata.
    "commit metadata factory": (4, 2),
}
_STREAMING = "org.apache.spark.sql.execution.streaming"
# The package of a class of Spark's streaming engine from 4.1 on, below `_STREAMING`.
_PACKAGES = {
    "CommitLog": "checkpointing",
    "CommitMetadata": "checkpointing",
    "FileSystemBasedCheckpointFileManager": "checkpointing",
    "StateStoreWriter": "operators.stateful",
    "StatefulOperatorStateInfo": "operators.stateful",
}
#: Names that logical operators had in older versions, and those that they have since.
RENAMED_OPERATORS = {"PythonMapInArrow": "MapInArrow"}
#: Kinds of query that only newer versions of Spark have, for `refuse`.
QUERY_SINCE: dict[str, Version] = {"transformWithState": (4, 1), "transformWithStateInPandas": (4, 0)}


def parsed(version: str) -> Version | None:
    """Major and minor number of a version such as ``4.0.1`` or ``3.5.1-amzn-0``; None when it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def check(version: str | None = None) -> None:
    """Refuse a Spark that onceflow does not run on.

    Args:
        version: of a running Spark; None: of the installed pyspark.

    Raises:
        EnvironmentUnusableError: it names the versions that work.
    """
    found = installed_spark_version() if version is None else version
    minor = parsed(found)
    if minor == (3, 5) and importlib.util.find_spec("distutils") is None:
        raise EnvironmentUnusableError(
            f"Spark {found} needs the module distutils, which Python no longer has since 3.12",
            next_step="use Python 3.10 or 3.11, or pip install setuptools, or use Spark 4",
        )
    if minor not in SUPPORTED:
        raise EnvironmentUnusableError(
            f"Spark {found} is not supported",
            detail=f"onceflow runs on Spark {names(SUPPORTED)}",
            next_step=f"pip install '{SPARK_REQUIREMENT}', and use a cluster of the same version",
        )


def check_running(version: str) -> None:
    """Refuse a Spark that is not supported, or whose version differs from that of PySpark.

    Args:
        version: of the running Spark, from its JVM.

    Raises:
        EnvironmentUnusableError: the version does not fit.
    """
    check(version)
    if parsed(version) != current():
        raise EnvironmentUnusableError(
            f"Spark {version} runs with pyspark {installed_spark_version()}, which is another version",
            next_step="install the pyspark of the same version, or correct SPARK_HOME",
        )


def names(versions: tuple[Version, ...]) -> str:
    """Versions as a text for users: ``3.5, 4.0 and 4.1``."""
    texts = [f"{major}.{minor}" for major, minor in versions]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def current() -> Version:
    """The version of PySpark in this process. That of the JVM is the same, see `check_running`."""
    global _current
    if _current is None:
        _current = parsed(installed_spark_version()) or (0, 0)
    return _current


_current: Version | None = None


def has(feature: str) -> bool:
    """Whether this version of Spark has a feature, one of `_SINCE`."""
    return current() >= _SINCE[feature]


def refuse(kind: str, flow: str | None = None) -> UnsupportedQueryError:
    """The error for a kind of query that this version of Spark does not have."""
    since = names((QUERY_SINCE[kind],))
    return UnsupportedQueryError(
        f"Spark {installed_spark_version()} has no {kind} in Python; it came with Spark {since}",
        flow=flow,
        next_step=f"use Spark {since} or later for this query",
    )


def streaming_class(name: str) -> str:
    """The full name of a class of Spark's streaming engine."""
    package = _PACKAGES[name]
    return f"{_STREAMING}.{package}.{name}" if has("streaming packages") else f"{_STREAMING}.{name}"


def java_class(spark: SparkSession, name: str) -> Any:
    """A class of the JVM by its full name, for its constructors and static methods."""
    found: Any = spark._jvm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def sql_class(spark: SparkSession, name: str) -> Any:
    """``Dataset`` or another class of Spark SQL's own engine, which Spark 4 calls classic."""
    package = "org.apache.spark.sql.classic" if has("classic") else "org.apache.spark.sql"
    return java_class(spark, f"{package}.{name}")
