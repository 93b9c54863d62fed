"""A flow with state in Spark and its topics, for tests: fill, run here or in a process to be killed, compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spark_state_queries as queries

from onceflow import Flow
from onceflow.protocol import progress as records
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.spark.checkpoint_files import LocalFolder, look_at
from onceflow.testing import independent

DRIVER = Path(__file__).with_name("spark_state_driver.py")
RECORDS_PER_BATCH = 100


@dataclass
class SparkStatePipe:
    """One flow with state in Spark, from two topics to one."""

    query: str
    bootstrap: str
    sources: list[str]
    target: str
    flow: str
    spark: Any
    checkpoint: Path
    launch: Callable[..., Any]
    end_driver: Callable[[Any], None]
    sent: dict[str, int] = field(default_factory=dict)

    def fill(self, count: int) -> None:
        """``count`` seconds of records: all on the left, two of three on the right."""
        for side, topic in enumerate(self.sources):
            first = self.sent.get(topic, 0)
            numbers = [n for n in range(first, first + count) if side == 0 or n % 3]
            self._produce(topic, numbers)
            self.sent[topic] = first + count

    def close_windows(self) -> None:
        """A record on each side, far in the future, on every partition."""
        for topic in self.sources:
            self._produce(topic, [queries.SENTINEL])

    def _produce(self, topic: str, numbers: list[int]) -> None:
        rows: list[tuple[bytes | None, bytes | None]] = [(f"key-{n % 7}".encode(), str(n).encode()) for n in numbers]
        independent.fill(self.bootstrap, topic, rows)

    def driver(self, rule: str | None) -> Any:
        arguments = {
            "bootstrap": self.bootstrap,
            "flow": self.flow,
            "query": self.query,
            "sources": self.sources,
            "target": self.target,
            "checkpoint": str(self.checkpoint),
            "records_per_batch": RECORDS_PER_BATCH,
        }
        return self.launch(DRIVER, rule, arguments)

    def run(self, **write: Any) -> Any:
        """In this process, until everything is written."""
        flow = Flow(self.flow, self.spark, bootstrap_servers=self.bootstrap)
        left, right = (flow.read(topic, max_records_per_batch=RECORDS_PER_BATCH) for topic in self.sources)
        rows = queries.QUERIES[self.query](left, right)
        query = flow.write(rows, topic=self.target, checkpoint=self.checkpoint, **write).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def forget_last_commit(self) -> None:
        """As a kill between EndTxn and Spark's commit log leaves the checkpoint."""
        last = look_at(LocalFolder(self.checkpoint)).committed
        for name in (f"{last}", f".{last}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)

    def tokens(self) -> dict[str, set[str]]:
        """Every token that was written for a key."""
        found: dict[str, set[str]] = {}
        for key, value in self.written():
            found.setdefault(key, set()).add(value)
        return found

    def progress(self) -> Progress | None:
        found = None
        for seen in independent.read_topic(self.bootstrap, PROGRESS_TOPIC):
            if seen.key == self.flow.encode() and seen.value is not None:
                found = records.decode(seen.key, seen.value)
        return found

    def expected(self) -> Counter[tuple[str, str]]:
        """The same query over the same records, as a batch; without what closes the windows."""
        left, right = (
            self.spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("subscribe", topic)
            .load()
            .where(f"CAST(CAST(value AS STRING) AS LONG) < {queries.SENTINEL}")
            for topic in self.sources
        )
        rows = queries.QUERIES[self.query](left, right).collect()
        return Counter((row["key"], row["value"]) for row in rows)

    def written(self) -> Counter[tuple[str, str]]:
        seen = independent.read_topic(self.bootstrap, self.target, decided=True)
        pairs = (((s.key or b"").decode(), (s.value or b"").decode()) for s in seen)
        return Counter(pair for pair in pairs if pair[0] != str(queries.SENTINEL))
