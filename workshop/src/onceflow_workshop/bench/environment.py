"""One SparkSession against one broker, for all runs of a benchmark."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.spark.jvm import SPARK_ERRORS
from onceflow_workshop.bench.processes import MARK, Meter

PARTITIONS = 4
_RUN_SECONDS = 1800


@dataclass
class Bench:
    """What all runs share.

    Args:
        spark: the session. servers: of the broker. broker_pids: its processes.
        folder: for local state and checkpoints. say: called with what is going on.
    """

    spark: Any
    servers: str
    broker_pids: tuple[int, ...]
    folder: Path
    say: Callable[[str], None]

    def topic(self, prefix: str) -> str:
        """A new topic."""
        from onceflow.testing.broker import create_topic

        name = f"{prefix}-{uuid.uuid4().hex[:6]}"
        create_topic(self.servers, name, PARTITIONS)
        return name

    def fill(self, topic: str, records: Iterable[tuple[bytes, bytes]]) -> int:
        """Produce them, keys placed as the Java client does. Returns how many."""
        from onceflow.testing.independent import fill

        return fill(self.servers, topic, records)

    def delete(self, *topics: str) -> None:
        """Delete topics that are there."""
        from onceflow_workshop.testing.librdkafka import admin_client

        with admin_client(self.servers, {}) as admin:
            there = admin.list_topics(timeout=30).topics
            gone = [topic for topic in topics if topic in there]
            for future in admin.delete_topics(gone).values() if gone else ():
                future.result(30)

    def meter(self, mark: str) -> Meter:
        """For runs whose workers are this mark's own."""
        from onceflow.spark import driver_jvm

        self.spark.sparkContext.environment[MARK] = mark
        return Meter(driver_jvm.process_id(), self.broker_pids, mark)

    def outputs(self, topic: str) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Keys and values of all committed records, by an independent consumer."""
        from onceflow.testing.independent import read_topic

        return ((seen.key, seen.value) for seen in read_topic(self.servers, topic, decided=True, seconds=300))


def end_session(spark: Any) -> None:
    """Stop a session, and before it the queries that run: after Ctrl-C, Spark would print a stack trace for each."""
    with contextlib.suppress(*SPARK_ERRORS):
        for query in spark.streams.active:
            stop_query(query)
    spark.stop()


def stop_query(query: Any) -> None:
    """Stop a query, also after Ctrl-C in the middle of a call of Spark's JVM."""
    with contextlib.suppress(*SPARK_ERRORS):
        if query.isActive:
            query.stop()


def wait(query: Any, first: Callable[[], None] = lambda: None) -> None:
    """Until the query has ended. ``first`` is called after its first batch."""
    end = time.monotonic() + _RUN_SECONDS
    begun = False
    while query.isActive:
        if time.monotonic() > end:
            query.stop()
            raise TimeoutError(f"a benchmark run took more than {_RUN_SECONDS} s")
        if not begun and query.recentProgress:
            begun = True
            first()
        query.awaitTermination(0.05)
    query.awaitTermination()  # raises what it failed with
