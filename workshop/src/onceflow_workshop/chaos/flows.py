"""The flows under test, and the names of their topics and folders.

- ``copy``: every record once, unchanged, through ``Flow.map``. Tagged, so that the history checker can check it.
- ``plain``: every record once, with its own columns and nothing else.
- ``ledger``: a processor with state per key, and processing-time timers. Tagged, too.
- ``unlogged``: count and sum of a key, too, in a table without a changelog.
- ``totals``: an aggregation with state in Spark, in a checkpoint that is kept.
- ``joiner``: looks up each key in the ledger's table, as it was at the offsets of the batch.
- ``pairs``: an interval join of two parts of the source, each number with the next one of its key.
- ``sorter``: a processor with dead letters and late records, followed by operators that change from start to start.
- ``sqlite``, ``postgres``, ``delta``: every record as a row of another system, see ``external.py``.

Values are JSON ``{"n": number}``; ``n`` is unique in the source.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import onceflow
from onceflow.planning.engine import AUTO, DRIVER, TASKS
from onceflow.testing.recorder import TAGGED_SCHEMA, tag_of, tagged_rows
from onceflow_workshop.chaos import external
from onceflow_workshop.chaos.feeder import KEYS

COPY, PLAIN, LEDGER, UNLOGGED = "copy", "plain", "ledger", "unlogged"
TOTALS, SORTER, JOINER, PAIRS = "totals", "sorter", "joiner", "pairs"
FLOWS = (COPY, PLAIN, LEDGER, UNLOGGED, TOTALS, SORTER, JOINER, PAIRS, *external.KINDS)
PAIRS_BEGIN_MS = 1_000_000
ALARM_EVERY = 10
ALARM_AFTER_MS = 500
# Numbers that are bad for the sorter, and numbers that are late for it as soon as there is a watermark.
BAD_EVERY, BAD = 100, 13
LATE_EVERY, LATE = 200, 50
#: The operators that may follow the sorter's step. None of them changes a key or a value.
OPERATORS = ("as it is", "select", "where", "repartition", "coalesce", "static join")


@dataclass(frozen=True)
class Names:
    """Topics, flows and folders of one run. ``prefix`` makes the names of a run unique on a cluster.

    Args:
        dsn: of the PostgreSQL server; "": there is none.
        versions: how often a copy has taken the place of the flow of a kind. It changes during a run.
        copied: the kind of which these are the names of a copy that runs beside the flow; "": they are no copy's.
    """

    prefix: str
    folder: Path
    dsn: str = ""
    versions: dict[str, int] = field(default_factory=dict)
    copied: str = ""

    def of_copy(self, kind: str) -> Names:
        """Names for the next copy of a flow. When the copy has taken its place, the table is still named so."""
        return replace(self, versions={**self.versions, kind: self.versions.get(kind, 0) + 1}, copied=kind)

    def own_table(self, kind: str) -> str | None:
        """The table of a flow."""
        return {LEDGER: self.table, SORTER: self.sums, JOINER: self.seen, PAIRS: self.waiting}.get(kind)

    @property
    def source(self) -> str:
        return f"{self.prefix}-in"

    @property
    def table(self) -> str:
        return self._of_version(LEDGER, "accounts")

    @property
    def alarms(self) -> str:
        return f"{self.prefix}-alarms{self._suffix}"

    @property
    def sums(self) -> str:
        """The sorter's table."""
        return self._of_version(SORTER, "sums")

    @property
    def seen(self) -> str:
        """The joiner's table."""
        return self._of_version(JOINER, "seen")

    @property
    def waiting(self) -> str:
        """The table of the pairs."""
        return self._of_version(PAIRS, "waiting")

    @property
    def late_pairs(self) -> str:
        return f"{self.prefix}-late-pairs{self._suffix}"

    @property
    def dead(self) -> str:
        return f"{self.prefix}-dead{self._suffix}"

    @property
    def replayed(self) -> str:
        """The topic that the sorter's dead letters are replayed to; no flow reads it."""
        return f"{self.prefix}-replayed"

    @property
    def late(self) -> str:
        return f"{self.prefix}-late{self._suffix}"

    @property
    def boot(self) -> Path:
        """The file with the boot id that executors see."""
        return self.folder / "boot"

    @property
    def state(self) -> Path:
        return self.folder / f"state{self._suffix}"

    @property
    def deletions(self) -> Path:
        """The file with one line for each time that `state` was deleted."""
        return self.folder / "deletions"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def clock(self) -> Path:
        """The file that says how many milliseconds the drivers' clock is ahead."""
        return self.folder / "clock"

    def flow(self, kind: str) -> str:
        return f"{self.prefix}-{kind}{self._suffix}"

    def output(self, kind: str) -> str:
        return f"{self.prefix}-{kind}-out{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"-v{self.versions[self.copied]}" if self.copied else ""

    def _of_version(self, kind: str, name: str) -> str:
        version = self.versions.get(kind, 0)
        return f"{self.prefix}-{name}" + (f"-v{version}" if version else "")

    @property
    def history(self) -> Path:
        """The file in which all drivers of all flows record."""
        return self.folder / "history.jsonl"

    def target(self, kind: str) -> external.Target:
        """Where a flow of one of ``external.KINDS`` writes."""
        return external.Target(kind, self.folder, self.dsn)

    def outputs(self, kinds: Iterable[str]) -> list[str]:
        """All topics that the flows of these kinds write to, without tables."""
        outputs = [self.output(kind) for kind in kinds if kind not in external.KINDS]
        return (
            outputs
            + ([self.alarms] if LEDGER in kinds else [])
            + ([self.dead, self.late] if SORTER in kinds else [])
            + ([self.late_pairs] if PAIRS in kinds else [])
        )


class Ledger(onceflow.Processor):
    """Writes count and sum of a key with every record. Every tenth number sets a timer that writes it once more.

    The time of the timer follows from the record, so it is the same in a copy of the flow (`--same-timers` of
    `onceflow promote`).
    """

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def __init__(self, flow: str, alarms: str) -> None:
        self.flow = flow
        self.alarms = alarms

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        account = state.get() or {"count": 0, "sum": 0}
        for record in records:
            n = record.value["n"]
            account = {"count": account["count"] + 1, "sum": account["sum"] + n}
            if n % ALARM_EVERY == 0:
                state.timers.register(str(n), record.timestamp_ms + ALARM_AFTER_MS, clock="processing")
            yield onceflow.Record(key, {"n": n, **account}, headers=[tag_of(record, flow=self.flow)])
        state.put(account)

    def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[onceflow.Record]:
        yield onceflow.Record(key, {"n": int(timer.name)}, topic=self.alarms)


class Unlogged(onceflow.Processor):
    """Writes count and sum of a key with every record."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def __init__(self, flow: str) -> None:
        self.flow = flow

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        account = state.get() or {"count": 0, "sum": 0}
        for record in records:
            n = record.value["n"]
            account = {"count": account["count"] + 1, "sum": account["sum"] + n}
            yield onceflow.Record(key, {"n": n, **account}, headers=[tag_of(record, flow=self.flow)])
        state.put(account)


class Sorter(onceflow.Processor):
    """Sums the numbers of a key. Some are bad, some are late: every number must end up in one of three topics."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON
    allowed_lateness = "1 second"

    def event_time(self, record: onceflow.Record) -> int:
        n = int(record.value["n"])
        return 0 if n % LATE_EVERY == LATE else 1_000_000 + n

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        total = state.get(0)
        for record in records:
            n = record.value["n"]
            if n % BAD_EVERY == BAD:
                raise ValueError(f"{n} is bad")
            total += n
            yield onceflow.Record(key, {"n": n})
        state.put(total)


class Joiner(onceflow.Processor):
    """Writes every number with the account that its key has in the ledger's table, and with the table's position."""

    value = onceflow.serdes.JSON
    state = onceflow.serdes.JSON
    output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[onceflow.Record]:
        accounts = state.table("accounts")
        state.put(state.get(0) + len(records))
        for record in records:
            yield onceflow.Record(key, {**record.value, "account": accounts.get(key), "at": accounts.position})


@dataclass(frozen=True)
class Choices:
    """Options that change from one start of the driver to the next.

    Args:
        tasks: whether tasks read and write all batches, whatever ``engines`` says.
        records_per_batch: most records in a batch.
        operator: one of `OPERATORS`.
        engines: ``engine=`` of each kind of flow; those that are not in it have ``auto``.
        standby: whether the driver waits while another one is active.
        own_hosts: whether local copies are on the disks of the hosts, some of them on two.
    """

    tasks: bool = False
    records_per_batch: int = 5_000
    transaction_timeout: str = "20 seconds"
    operator: str = "select"
    engines: Mapping[str, str] = field(default_factory=dict)
    standby: bool = False
    own_hosts: bool = False

    def copies(self, kind: str) -> int:
        """``copies=`` of a flow: where there are hosts the ledger has two, the joiner one or two, and others one."""
        is_double = kind == LEDGER or (kind == JOINER and self.operator in OPERATORS[::2])
        return 2 if self.own_hosts and is_double else 1

    def state_dir(self, names: Names) -> Path | None:
        """``state_dir=`` of flows. None: each host has its own, and so does the driver."""
        return None if self.own_hosts else names.state

    def engine(self, kind: str) -> str:
        """``engine=`` of a flow. The driver cannot run one with a checkpoint, so ``auto`` takes its place."""
        engine = TASKS if self.tasks else self.engines.get(kind, AUTO)
        return AUTO if kind == TOTALS and engine == DRIVER else engine

    def write(self, kind: str) -> dict[str, Any]:
        """Arguments of ``Flow.write``."""
        return {
            "engine": self.engine(kind),
            "transaction_timeout": self.transaction_timeout,
            "trigger": "100 milliseconds",
        }


def start(kind: str, spark: SparkSession, bootstrap_servers: str, names: Names, choices: Choices) -> Any:
    """Start the query of one flow."""
    # Drivers are also started while brokers are down.
    flow = onceflow.Flow(
        names.flow(kind),
        spark,
        bootstrap_servers=bootstrap_servers,
        connect_timeout="60 seconds",
        standby=choices.standby,
    )
    source = flow.read(names.source, max_records_per_batch=choices.records_per_batch)
    kept: dict[str, Any] = {"state_dir": choices.state_dir(names), "copies": choices.copies(kind)}
    if kind in external.KINDS:
        rows = source.selectExpr(*external.COLUMNS)
        sink = names.target(kind).sink()
        return flow.write_external(rows, sink, engine=choices.engine(kind), trigger="100 milliseconds").start()
    if kind == COPY:
        columns = source.selectExpr("key", "value", "topic", "partition", "offset", "0L AS n")
        tags = functools.partial(tagged_rows, flow=flow.name)
        rows = flow.map(columns, tags, schema=TAGGED_SCHEMA)
        return flow.write(rows, topic=names.output(kind), **choices.write(kind)).start()
    if kind == PLAIN:
        rows = _unchanged(source.select("key", "value"), choices.operator)
        return flow.write(rows, topic=names.output(kind), **choices.write(kind)).start()
    if kind == LEDGER:
        accounts = flow.process(source, Ledger(flow.name, names.alarms), table=names.table, **kept)
        return flow.write(accounts, topic=names.output(kind), **choices.write(kind)).start()
    if kind == UNLOGGED:
        rows = flow.process(source, Unlogged(flow.name), table=f"{names.prefix}-unlogged", changelog=False, **kept)
        return flow.write(rows, topic=names.output(kind), **choices.write(kind)).start()
    if kind == SORTER:
        rows = flow.process(
            source,
            Sorter(),
            table=names.sums,
            on_error="dead-letter",
            dead_letter_topic=names.dead,
            late_topic=names.late,
            **kept,
        )
        return flow.write(_behind(rows, choices.operator), topic=names.output(kind), **choices.write(kind)).start()
    if kind == PAIRS:
        rows = _pairs(flow, source, names.waiting, names.late_pairs, **kept)
        return flow.write(rows, topic=names.output(kind), **choices.write(kind)).start()
    if kind == JOINER:
        # On half of the starts each task has only its own partition of the ledger's table.
        own_part = choices.operator in OPERATORS[::2]
        joined = onceflow.JoinTable(names.table, value=onceflow.serdes.JSON, co_partitioned=own_part)
        rows = flow.process(source, Joiner(), table=names.seen, tables={"accounts": joined}, **kept)
        return flow.write(rows, topic=names.output(kind), **choices.write(kind)).start()
    options: dict[str, Any] = {**choices.write(kind), "checkpoint": str(names.checkpoint), "output_mode": "update"}
    return flow.write(_totals(source), topic=names.output(kind), **options).start()


def _pairs(flow: onceflow.Flow, source: DataFrame, table: str, late_topic: str, **kept: Any) -> DataFrame:
    """The source has the numbers of a key in the distance of `KEYS`. They are of the left and the right stream in turn,
    and event time is the number in milliseconds, so each left one has the next one of its key as its partner."""
    number = "bigint(get_json_object(string({}), '$.n'))"
    numbered = source.selectExpr("*", f"{number.format('value')} AS n").selectExpr(
        *["key", "value", "topic", "partition", "offset"],
        f"timestamp_millis({PAIRS_BEGIN_MS} + n) AS timestamp",
        f"(n div {KEYS}) % 2 AS side",
    )
    joined = flow.join_interval(
        numbered.where("side = 0").drop("side"),
        numbered.where("side = 1").drop("side"),
        table=table,
        before=0,
        after=1.5 * KEYS / 1000,
        allowed_lateness="1 second",
        late_topic=late_topic,
        **kept,
    )
    left, right = number.format("left_value"), number.format("right_value")
    return joined.selectExpr("key", f"to_json(struct({left} AS n, {right} AS partner)) AS value")


def _unchanged(rows: DataFrame, operator: str) -> DataFrame:
    """The same rows in the same order: without Spark, by its expressions, or by a job for each batch."""
    if operator in ("select", "static join"):
        return _behind(rows, operator)
    if operator == "where":
        return rows.where("value IS NOT NULL AND length(value) > 0")
    return rows.selectExpr("key", "unbase64(base64(value)) AS value")


def _behind(rows: DataFrame, operator: str) -> DataFrame:
    if operator == "select":
        return rows.select("key", "value")
    if operator == "where":
        return rows.where("value IS NOT NULL")
    if operator == "repartition":
        return rows.repartition(3)
    if operator == "coalesce":
        return rows.coalesce(1)
    if operator == "static join":
        return rows.join(rows.sparkSession.range(1).withColumnRenamed("id", "nothing")).select("key", "value")
    return rows


def _totals(source: DataFrame) -> DataFrame:
    numbers = source.select("key", F.get_json_object(F.col("value").cast("string"), "$.n").cast("long").alias("n"))
    totals = numbers.groupBy("key").agg(F.count("n").alias("count"), F.sum("n").alias("sum"))
    return totals.select("key", F.to_json(F.struct("count", "sum")).alias("value"))
