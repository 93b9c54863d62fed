"""Rows into a table of PostgreSQL: by a flow, by Spark's JDBC writer, and by COPY alone.

One broker, one SparkSession and one server for all. Contenders take turns with the same records, and every table is
checked. Rates of the first two come from Spark's own progress reports, without the first batch.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.broker.local import LocalBroker
from onceflow.host.jars import Coordinate, resolve
from onceflow.testing.broker import create_topic
from onceflow.testing.independent import fill
from onceflow.testing.postgres import LocalPostgres
from onceflow.testing.processes import descendants
from onceflow_workshop.bench.environment import PARTITIONS, end_session, wait

FLOW, JDBC, PLAIN_JDBC, READ = "onceflow", "spark jdbc", "spark jdbc, its defaults", "only read"
COPY, COPIES = "copy", "copy, 2 connections"
CONTENDERS = (FLOW, JDBC, PLAIN_JDBC, READ, COPY, COPIES)
_DRIVER = Coordinate("org.postgresql", "postgresql", "42.7.8", ("42.7.7", "42.7.4"))
# As a server has them that is used for more than tests: commits reach the disk.
_SETTINGS = {"fsync": "on", "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
_NOTE = "a note of some length, as payments have them: invoice "
_COPY_ROWS = 50_000  # in an Arrow batch
# Five columns of the kinds that tables of payments have; more of the same kinds for a wide table.
_FIVE = (
    ("id", "bigint", "bigint(partition) * 1000000000 + offset"),
    ("account", "text", "string(key)"),
    ("amount", "numeric(12,2)", "decimal(offset % 100000) / 100"),
    ("made", "timestamptz", "timestamp_millis(1750000000000 + offset)"),
    ("note", "text", "string(value)"),
)


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        records: in the topic. wide_records: those that go to a table of 50 columns; 0: none.
        records_per_batch: bound of a batch, for both writers.
        rounds: how often each contender runs; medians are reported.
        key: whether the tables have a primary key.
        dsn: of a server that runs already; None: one is started.
    """

    records: int = 1_000_000
    wide_records: int = 100_000
    records_per_batch: int = 200_000
    rounds: int = 3
    key: bool = False
    dsn: str | None = None
    cores: int = 2


@dataclass(frozen=True)
class Columns:
    """The columns of a table: name, type, and the expression over Kafka's columns."""

    all: tuple[tuple[str, str, str], ...]

    @staticmethod
    def of(count: int) -> Columns:
        """Five, and repetitions of them."""
        more = [(f"{name}_{n}", kind, how) for n in range(2, count // 5 + 1) for name, kind, how in _FIVE]
        return Columns((*_FIVE, *more))

    def create(self, table: str, *, key: bool) -> str:
        """The statement that makes the table."""
        listed = ", ".join(f"{name} {kind}" for name, kind, _ in self.all)
        return f"CREATE TABLE {table} ({listed}{', PRIMARY KEY (id)' if key else ''})"

    def select(self, df: Any) -> Any:
        """The rows of the table, from records."""
        return df.selectExpr(*(f"{how} AS {name}" for name, _, how in self.all))


@dataclass
class Measured:
    """The runs of one contender."""

    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # per row, of driver, JVM, workers and server
    steps: dict[str, float] = field(default_factory=dict)
    correct: bool = True


@dataclass
class Bench:
    """What all runs share. ``topic`` has ``records`` records."""

    spark: Any
    servers: str
    dsn: str
    topic: str
    records: int
    columns: Columns
    choices: Choices
    say: Callable[[str], None]

    def run(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure all contenders, in turn."""
        found = {contender: Measured() for contender in CONTENDERS}
        in_memory = self._in_memory()
        for turn in range(self.choices.rounds + 1):
            for contender in CONTENDERS:
                if turn == 0 and contender in (COPY, COPIES):
                    continue
                measured = Measured() if turn == 0 else found[contender]
                rate = self._run_once(contender, in_memory, measured)
                measured.rates.append(rate)
                what = f"round {turn} of {self.choices.rounds}" if turn else "warming up"
                self.say(f"{name}, {what}: {contender:26} {rate:10,.0f} rows/s")
        base = statistics.median(found[JDBC].rates)
        for contender, measured in found.items():
            rate = statistics.median(measured.rates)
            yield {
                "bench": name,
                "contender": contender,
                "rows_per_s": round(rate),
                "min_rows_per_s": round(min(measured.rates)),
                "max_rows_per_s": round(max(measured.rates)),
                "ratio_to_spark_jdbc": round(rate / base, 2),
                "cpu_us_per_row": round(statistics.median(measured.cpu_us), 2) if measured.cpu_us else None,
                "correct": "yes" if measured.correct else "no",
                "rows": self.records,
                "columns": len(self.columns.all),
                # Of all rounds, without first batches.
                "write_s": round(measured.steps["write"], 2) if measured.steps else None,
                "commit_s": round(measured.steps["commit"], 2) if measured.steps else None,
            }

    def _run_once(self, contender: str, in_memory: Sequence[pa.Table], measured: Measured) -> float:
        """Write all rows to a new table, check it and drop it. Returns rows per second."""
        import psycopg

        table = f"bench_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(self.columns.create(table, key=self.choices.key))
            before = tree_cpu_s(os.getpid())
            try:
                if contender == FLOW:
                    rate = self._flow(table, measured)
                elif contender in (JDBC, PLAIN_JDBC, READ):
                    rate = self._jdbc(table, contender)
                else:
                    rate = self._copy(table, in_memory, 2 if contender == COPIES else 1)
                measured.cpu_us.append((tree_cpu_s(os.getpid()) - before) / self.records * 1e6)
                found = connection.execute(f"SELECT count(*), count(DISTINCT id), sum(id) FROM {table}").fetchone()
                measured.correct &= contender == READ or found == self._expected
            finally:
                connection.execute(f"DROP TABLE {table}")
        return rate

    @property
    def _per_batch(self) -> int:
        """The first batch is not counted, so there must be more."""
        return min(self.choices.records_per_batch, self.records // 4)

    @property
    def _expected(self) -> tuple[int, int, int]:
        each = self.records // PARTITIONS
        total = sum(p * 1_000_000_000 * each + each * (each - 1) // 2 for p in range(PARTITIONS))
        return self.records, self.records, total

    def _flow(self, table: str, measured: Measured) -> float:
        from onceflow import Flow, PostgresSink

        with Flow(table, self.spark, bootstrap_servers=self.servers) as flow:
            rows = self.columns.select(flow.read(self.topic, max_records_per_batch=self._per_batch))
            query = flow.write_external(rows, PostgresSink(self.dsn, table), once=True).start()
            wait(query)
            for batch in query.batches[1:]:
                for step, seconds in batch.seconds.items():
                    measured.steps[step] = measured.steps.get(step, 0.0) + seconds
            return _rate(query)

    def _jdbc(self, table: str, contender: str) -> float:
        """As people write it, with the driver's best settings or without any. For ``READ`` the rows are thrown away."""
        from psycopg import conninfo

        given = conninfo.conninfo_to_dict(self.dsn)
        url = f"jdbc:postgresql://{given.get('host')}:{given.get('port', 5432)}/{given.get('dbname')}"
        options = {
            "driver": "org.postgresql.Driver",
            "user": str(given.get("user") or ""),
            "password": str(given.get("password") or ""),
            **({"batchsize": "10000", "reWriteBatchedInserts": "true"} if contender == JDBC else {}),
        }

        def write(df: Any, _: int) -> None:
            if contender != READ:
                df.write.jdbc(url, table, mode="append", properties=options)
            else:
                df.write.format("noop").mode("overwrite").save()

        source = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self._per_batch)
            .load()
        )
        with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as checkpoint:
            writer = self.columns.select(source).writeStream.foreachBatch(write)
            query = writer.option("checkpointLocation", Path(checkpoint).as_uri()).trigger(availableNow=True).start()
            wait(query)
            return _rate(query)

    def _in_memory(self) -> list[pa.Table]:
        """All rows as Arrow tables, as tasks have them."""
        self.say(f"collecting {self.records:,} rows for COPY")
        rows = (
            self.spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", self.topic)
            .load()
        )
        table = pa.Table.from_batches(collect_all(self.columns.select(rows)))
        return [table.slice(at, _COPY_ROWS) for at in range(0, table.num_rows, _COPY_ROWS)]

    def _copy(self, table: str, rows: Sequence[pa.Table], connections: int) -> float:
        from adbc_driver_postgresql import dbapi

        def copy(part: Sequence[pa.Table]) -> None:
            batches = [batch for each in part for batch in each.to_batches()]
            with dbapi.connect(self.dsn) as connection, connection.cursor() as cursor:
                reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
                cursor.adbc_ingest(table, reader, mode="append")
                connection.commit()

        started = time.monotonic()
        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(copy, [rows[n::connections] for n in range(connections)]))
        return self.records / (time.monotonic() - started)


def collect_all(df: Any) -> list[pa.RecordBatch]:
    """The rows of a DataFrame as Arrow batches."""
    from onceflow.spark.collect import collect

    return collect(df, interpreted=False)


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process, and of all that it has started: also of those that have ended."""
    total = 0.0
    for pid in (root, *descendants(root)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run all parts; yields one result (a JSON object) after the other."""
    from onceflow.session import session

    jars = resolve([_DRIVER], transitive=False)
    with (
        tempfile.TemporaryDirectory(prefix="onceflow-") as folder,
        LocalBroker(Path(folder) / "broker") as broker,
        _server(choices.dsn, Path(folder)) as dsn,
    ):
        servers = broker.bootstrap_servers
        config = {"spark.driver.extraClassPath": ":".join(map(str, jars)), "spark.driver.memory": "2g"}
        spark = session(app_name="onceflow-bench", master=f"local[{choices.cores}]", config=config)
        try:
            for records, columns in ((choices.records, 5), (choices.wide_records, 50)):
                if records:
                    whole = records - records % PARTITIONS
                    say(f"producing {whole:,} records")
                    topic = _filled(servers, whole)
                    bench = Bench(spark, servers, dsn, topic, whole, Columns.of(columns), choices, say)
                    yield from bench.run(f"postgres, {columns} columns")
        finally:
            end_session(spark)


class _server:
    """A server for the runs, or the one that is there: its DSN."""

    def __init__(self, dsn: str | None, folder: Path) -> None:
        self._dsn = dsn
        self._own = None if dsn else LocalPostgres(folder / "postgres", settings=_SETTINGS)

    def __enter__(self) -> str:
        if self._own is not None:
            self._own.start()
            return self._own.dsn
        return self._dsn or ""

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.stop()


def _filled(servers: str, records: int) -> str:
    topic = f"bench-{uuid.uuid4().hex[:6]}"
    create_topic(servers, topic, PARTITIONS)
    each = records // PARTITIONS
    keys = _keys_by_partition()

    def rows() -> Iterator[tuple[bytes, bytes]]:
        for n in range(each):
            for partition in range(PARTITIONS):
                of_partition = keys[partition]
                yield of_partition[n % len(of_partition)], f"{_NOTE}{n}".encode()

    fill(servers, topic, rows())
    return topic


def _keys_by_partition() -> list[list[bytes]]:
    """Keys that Java's default partitioner spreads evenly: as many records in each partition."""
    from onceflow.protocol.partitioners import key_partitions

    keys = [f"account-{n:06d}".encode() for n in range(10_000)]
    places = key_partitions(pa.array(keys, pa.binary()), PARTITIONS).tolist()
    return [[key for key, place in zip(keys, places, strict=True) if place == each] for each in range(PARTITIONS)]


def _rate(query: Any) -> float:
    """Rows per second, from Spark's progress reports, without the first batch."""
    reports = [p for p in query.recentProgress if p["numInputRows"] > 0][1:]
    seconds = sum(float(p["durationMs"]["triggerExecution"]) for p in reports) / 1000
    return sum(int(p["numInputRows"]) for p in reports) / seconds if seconds else 0.0
