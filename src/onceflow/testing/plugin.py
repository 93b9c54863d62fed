"""pytest fixtures, registered by the entry point of the package. Spark is imported when a test uses its fixture."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Topics outlive a run when the broker does (ONCEFLOW_TEST_BOOTSTRAP), so their names differ from run to run.
_run = uuid.uuid4().hex[:6]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def onceflow_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a real Kafka, one for the whole run."""
    from onceflow.testing.broker import running_broker

    with running_broker(tmp_path_factory.mktemp("broker")) as bootstrap_servers:
        yield bootstrap_servers


@pytest.fixture
def make_topic(onceflow_broker: str) -> Callable[..., str]:
    """``make_topic(prefix="topic", partitions=4, **configs)``: create a topic and return its new name.

    Dots in topic configs are written as underscores: ``make_topic(cleanup_policy="compact")``.
    """
    from onceflow.testing.broker import create_topic

    def make(prefix: str = "topic", partitions: int = 4, **configs: Any) -> str:
        name = f"{prefix}-{_run}-{next(_numbers)}"
        options = {key.replace("_", "."): str(value) for key, value in configs.items()}
        create_topic(onceflow_broker, name, partitions, options)
        return name

    return make


@pytest.fixture(scope="session")
def onceflow_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A SparkSession with two local cores, one for the whole run."""
    from onceflow.session import session

    warehouse = tmp_path_factory.mktemp("spark-warehouse")
    spark = session(
        app_name="onceflow-tests",
        master="local[2]",
        config={"spark.sql.warehouse.dir": str(warehouse)},
    )
    yield spark
    spark.stop()
