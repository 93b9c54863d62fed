"""State: balances by a ``Processor`` and a ``ColumnProcessor`` against Spark's own ``transformWithState``.

Everything runs in one SparkSession against one broker and contenders take turns. After every run all outputs and all
rows of the table are compared with a fold that knows nothing of either; a figure of a wrong run says so. Further parts:
how fast lost state comes back, and what memory a large table takes. Processor time and memory are read from ``/proc``.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from onceflow.bench.balance_service import (
    Balance,
    ColumnBalance,
    Expected,
    expected,
    payment,
    payments,
    problem_of,
    row_of,
    shuffled,
    some_accounts,
)

PARTITIONS = 4
SPARK = "transformWithState"
SPARK_PANDAS = "transformWithStateInPandas"
RECORDS, RECORDS_OFTEN = "Processor, 1 s", "Processor, often"
COLUMNS, COLUMNS_OFTEN = "ColumnProcessor, 1 s", "ColumnProcessor, often"
VARIANTS = (RECORDS, RECORDS_OFTEN, COLUMNS, COLUMNS_OFTEN, SPARK, SPARK_PANDAS)
PARTS = ("throughput", "restore", "large")
SMALL_BATCH, TASK_BATCH = 400, 30_000
_RUN_SECONDS = 1800
_MARK = "ONCEFLOW_BENCH_MARK"  # in the environment of Python workers, so that each variant has its own
_TICKS = os.sysconf("SC_CLK_TCK")
_RESTORED = re.compile(r"table (\S+): restored, (\d+) records read in ([\d.]+) s")


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        records: over this many accounts. rounds: how often each variant runs; medians are reported.
        often: records in a batch of the variants that commit as often as they can.
        spark_records_per_batch: of transformWithState, whose cost falls with the size of a batch.
        keys: in the table that is restored. large_keys: of the large one.
        parts: of PARTS. pandas: whether transformWithStateInPandas takes part, too.
    """

    records: int
    accounts: int
    rounds: int
    often: int
    spark_records_per_batch: int
    keys: int
    large_keys: int
    parts: tuple[str, ...]
    pandas: bool = False
    cores: int = 2


@dataclass
class Measured:
    """One run of one variant, without its first batch."""

    records_per_s: float
    records: int
    commits: int
    batch_ms: list[float]
    cpu_s: dict[str, float]
    meter: Meter
    path: str = ""
    steps_ms: dict[str, float] = field(default_factory=dict)
    problem: str = ""


# ---- processes -------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """What ``/proc/PID/stat`` tells: ``begun`` (clock ticks since the machine's start) makes a pid unique."""

    parent: int
    cpu_s: float
    begun: int


def stat_of(text: str) -> Process:
    """Of a ``/proc/PID/stat``; CPU seconds of the process itself."""
    fields = text.rpartition(")")[2].split()
    return Process(int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]))


def busy_of(text: str) -> float:
    """CPU seconds of everybody on the machine, of a ``/proc/stat``."""
    user, nice, system, _, _, irq, softirq = map(int, text.splitlines()[0].split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def memory_of(text: str) -> tuple[float, float]:
    """Resident and anonymous MiB of a ``/proc/PID/status``."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    kib = [int(fields[name].split()[0]) if name in fields else 0 for name in ("VmRSS", "RssAnon")]
    return kib[0] / 1024, kib[1] / 1024


class Meter:
    """CPU time of all who take part, and the peak memory of the Python workers that bear a mark."""

    def __init__(self, jvm: int, broker: Sequence[int], mark: str) -> None:
        self._jvm, self._broker, self._mark = jvm, broker, f"{_MARK}={mark}".encode()
        self._workers: dict[int, bool] = {}
        self._spent: dict[tuple[int, int], float] = {}  # by workers, also those that have ended
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begun = self._cpu()
        self.rss_mib: float | None = None
        self.anon_mib: float | None = None

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def reset(self) -> None:
        """Count CPU time from here."""
        self._begun = self._cpu()

    def cpu_s(self) -> dict[str, float]:
        """Seconds since the last reset, by who spent them; ``others``: whatever else runs on this machine."""
        return {name: seconds - self._begun[name] for name, seconds in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        with self._lock:
            stats = dict(_stats())
            for pid in below(self._jvm, stats):
                self._spent[pid, stats[pid].begun] = stats[pid].cpu_s
            spent = {
                "driver": time.process_time(),
                "jvm": stats[self._jvm].cpu_s if self._jvm in stats else 0.0,
                "workers": sum(self._spent.values()),
                "broker": sum(stats[pid].cpu_s for pid in self._broker if pid in stats),
            }
            everybody = _read("stat").decode()
        return {**spent, "others": busy_of(everybody) - sum(spent.values()) if everybody else 0.0}

    def _watch(self) -> None:
        scanned = float("-inf")
        while not self._done.wait(0.1):
            if time.monotonic() - scanned > 1:
                scanned = time.monotonic()
                self._cpu()  # so that the time of workers that end is not lost
                for pid in below(self._jvm, dict(_stats())):
                    if not self._workers.get(pid):
                        self._workers[pid] = self._mark in _read(f"{pid}/environ").split(b"\0")
            for pid in [pid for pid, ours in self._workers.items() if ours]:
                text = _read(f"{pid}/status").decode()
                if text:
                    rss, anon = memory_of(text)
                    self.rss_mib, self.anon_mib = max(self.rss_mib or 0, rss), max(self.anon_mib or 0, anon)


def _read(name: str) -> bytes:
    try:
        return Path("/proc", name).read_bytes()
    except OSError:  # it has ended, or this is no Linux
        return b""


def _stats() -> Iterator[tuple[int, Process]]:
    for name in os.listdir("/proc") if _read("stat") else []:
        text = _read(f"{name}/stat").decode(errors="replace") if name.isdigit() else ""
        if text:
            yield int(name), stat_of(text)


def below(root: int, stats: Mapping[int, Process]) -> list[int]:
    """Processes that descend from one."""
    children: dict[int, list[int]] = {}
    for pid, process in stats.items():
        children.setdefault(process.parent, []).append(pid)
    found, rest = [], list(children.get(root, []))
    while rest:
        found.append(rest.pop())
        rest += children.get(found[-1], [])
    return found


# ---- one run ---------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What all runs share."""

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
        from onceflow.broker.process import admin_client

        with admin_client(self.servers, {}) as admin:
            there = admin.list_topics(timeout=30).topics
            gone = [topic for topic in topics if topic in there]
            for future in admin.delete_topics(gone).values() if gone else ():
                future.result(30)

    def meter(self, mark: str) -> Meter:
        """For runs whose workers are this mark's own."""
        self.spark.sparkContext.environment[_MARK] = mark
        return Meter(self.spark.sparkContext._gateway.proc.pid, self.broker_pids, mark)

    def outputs(self, topic: str) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Keys and values of all committed records, by an independent consumer."""
        from onceflow.testing.independent import read_topic

        return ((seen.key, seen.value) for seen in read_topic(self.servers, topic, decided=True, seconds=300))

    def rows(self, table: str) -> dict[bytes, tuple[int, int]]:
        """The table topic: last value of each key."""
        return {key: row_of(raw) for key, raw in self.outputs(table) if key is not None and raw is not None}

    def local_rows(self, name: str) -> dict[bytes, tuple[int, int]]:
        """What the local stores of a flow's table hold."""
        from onceflow import LocalTable

        return {key: row_of(raw) for key, raw in LocalTable(self.folder / name / f"{name}-table").range()}

    def state_mib(self, name: str) -> float:
        """Local files of a flow."""
        return round(sum(f.stat().st_size for f in (self.folder / name).rglob("*") if f.is_file()) / 2**20, 1)

    def flow(self, name: str, source: str, target: str, processor: Any, records_per_batch: int, **write: Any) -> Any:
        """A started query that processes everything there is; its table is called as the flow."""
        from onceflow import Flow

        flow = Flow(name, self.spark, bootstrap_servers=self.servers)
        try:
            df = flow.read(source, max_records_per_batch=records_per_batch)
            outputs = flow.process(df, processor, table=f"{name}-table", state_dir=self.folder)
            return flow.write(outputs, topic=target, once=True, **write).start()
        except BaseException:
            flow.close()
            raise

    def transform_with_state(self, source: str, target: str, records_per_batch: int, *, pandas: bool) -> Any:
        """The same by Spark's operator and Spark's sink: at-least-once."""
        from pyspark.sql import functions as F

        from onceflow.client.settings import ClientSettings

        df = (
            self.spark.readStream.format("kafka")
            .options(**ClientSettings(self.servers).spark_reader())
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .option("kafka.isolation.level", "read_committed")
            .option("maxOffsetsPerTrigger", records_per_batch)
            .load()
        )
        parsed = F.from_json(F.col("value").cast("string"), "account string, amount long, id long")
        grouped = df.select(parsed.alias("v")).select("v.*").groupBy("account")
        run = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
        out = run(spark_processor(pandas=pandas), "account string, id long, balance long, count long", "Update", "None")
        value = F.to_json(F.struct("account", "id", "balance", "count"))
        return (
            out.select(F.col("account").alias("key"), value.alias("value"))
            .writeStream.format("kafka")
            .outputMode("update")
            .option("kafka.bootstrap.servers", self.servers)
            .option("topic", target)
            .option("kafka.acks", "all")
            .option("checkpointLocation", (self.folder / target).as_uri())
            .trigger(availableNow=True)
            .start()
        )


def can_transform_with_state() -> bool:
    """Whether what Spark's state workers need is installed; PySpark itself does not bring it."""
    try:
        importlib.import_module("google.protobuf.descriptor")
    except ImportError:
        return False
    return True


def spark_processor(*, pandas: bool) -> Any:
    """A ``StatefulProcessor`` that keeps balance and count of an account."""
    import pandas as pd
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Rows(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.known = handle.getValueState("known", "balance long, count long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            balance, count = self.known.get() if self.known.exists() else (0, 0)
            for row in rows:
                balance += row.amount
                count += 1
                yield Row(account=key[0], id=row.id, balance=balance, count=count)
            self.known.update((balance, count))

        def close(self) -> None:
            pass

    class Frames(Rows):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            balance, count = self.known.get() if self.known.exists() else (0, 0)
            for frame in rows:
                balances = frame["amount"].cumsum() + balance
                counts = range(count + 1, count + 1 + len(frame))
                yield pd.DataFrame({"account": key[0], "id": frame["id"], "balance": balances, "count": counts})
                balance, count = int(balances.iloc[-1]), count + len(frame)
            self.known.update((balance, count))

    return Frames() if pandas else Rows()


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


def run_variant(bench: Bench, source: str, variant: str, records_per_batch: int, want: Expected) -> Measured:
    """Process the topic once, from its start to its end, and check what came out."""
    target = bench.topic("bench-out")
    try:
        with bench.meter(variant) as meter:
            query = _started(bench, source, target, variant, records_per_batch)
            wait(query, meter.reset)
            cpu_s = meter.cpu_s()
        batches = batches_of(query.recentProgress)
        rate, batch_ms = rate_of(batches)
        measured = Measured(rate, sum(rows for rows, _ in batches[1:]), len(batches), batch_ms, cpu_s, meter)
        if variant not in (SPARK, SPARK_PANDAS):
            measured.path = "/".join(dict.fromkeys(batch.path for batch in query.batches[1:]))
            measured.steps_ms = steps_ms(query.batches)
        rows = None if variant in (SPARK, SPARK_PANDAS) else bench.rows(f"{target}-table")
        measured.problem = problem_of(bench.outputs(target), rows, want)
        return measured
    finally:
        bench.delete(target, *table_topics(target))
        shutil.rmtree(bench.folder / target, ignore_errors=True)


def _started(bench: Bench, source: str, target: str, variant: str, records_per_batch: int) -> Any:
    if variant in (SPARK, SPARK_PANDAS):
        return bench.transform_with_state(source, target, records_per_batch, pandas=variant == SPARK_PANDAS)
    processor = Balance() if variant in (RECORDS, RECORDS_OFTEN) else ColumnBalance()
    return bench.flow(target, source, target, processor, records_per_batch)


def batches_of(reports: Iterable[Any]) -> list[tuple[int, float]]:
    """Rows and milliseconds of each batch, from Spark's progress reports."""
    return [
        (int(report["numInputRows"]), float(report["durationMs"]["triggerExecution"]))
        for report in reports
        if report["numInputRows"] > 0
    ]


def rate_of(batches: Sequence[tuple[int, float]]) -> tuple[float, list[float]]:
    """Rows per second, and the milliseconds of each batch that counts: not the first one, and not a small rest."""
    most = max((rows for rows, _ in batches), default=0)
    full = [(rows, ms) for rows, ms in batches[1:] if rows * 2 >= most]
    total_ms = sum(ms for _, ms in full)
    return (sum(rows for rows, _ in full) / total_ms * 1000 if total_ms else 0.0), [ms for _, ms in full]


def steps_ms(batches: Sequence[Any]) -> dict[str, float]:
    """Median milliseconds of each step, without the first batch."""
    later = batches[1:] or batches
    return {
        name: round(statistics.median(batch.seconds.get(name, 0.0) for batch in later) * 1000, 1)
        for name in (later[0].seconds if later else ())
    }


def restored_of(messages: Iterable[str]) -> tuple[int, float]:
    """Records and seconds of all partitions that log lines say were restored."""
    found = [match for match in map(_RESTORED.fullmatch, messages) if match]
    return sum(int(match[2]) for match in found), sum(float(match[3]) for match in found)


# ---- parts -----------------------------------------------------------------------------------------------


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run all parts; yields one result (a JSON object) after the other. ``correct`` is what a check found."""
    from onceflow.broker.local import LocalBroker
    from onceflow.session import session

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, LocalBroker(Path(folder) / "broker") as broker:
        config = {"spark.sql.streaming.numRecentProgressUpdates": "5000"}
        spark = session(app_name="onceflow-bench", master=f"local[{choices.cores}]", config=config)
        try:
            bench = Bench(spark, broker.bootstrap_servers, broker.status().pids, Path(folder) / "state", say)
            if "throughput" in choices.parts:
                yield from throughput(bench, choices)
            if "restore" in choices.parts:
                yield from restore(bench, choices.keys)
            if "large" in choices.parts:
                yield from large(bench, choices)
        finally:
            spark.stop()


def throughput(bench: Bench, choices: Choices) -> Iterator[dict[str, Any]]:
    """All variants in turn."""
    sent = list(payments(choices.records, choices.accounts))
    want = expected(sent)
    source = bench.topic("bench-in")
    bench.say(f"broker at {bench.servers}; {bench.fill(source, sent):,} records; warming up")
    variants = [variant for variant in VARIANTS if choices.pandas or variant != SPARK_PANDAS]
    if not can_transform_with_state():
        variants = [variant for variant in variants if variant not in (SPARK, SPARK_PANDAS)]
        bench.say("transformWithState is left out: its Python workers need protobuf (pip install protobuf)")
    sizes = {variant: warmed_up(bench, source, sent, want, variant, choices) for variant in variants}
    found: dict[str, list[Measured]] = {variant: [] for variant in variants}
    for turn in range(choices.rounds):
        for variant in variants if turn % 2 == 0 else variants[::-1]:
            measured = run_variant(bench, source, variant, sizes[variant], want)
            found[variant].append(measured)
            rate, problem = f"{measured.records_per_s:10,.0f} records/s", measured.problem
            bench.say(f"round {turn + 1} of {choices.rounds}: {variant:26} {rate} {problem}")
    bench.delete(source)
    base = statistics.median(measured.records_per_s for measured in found[SPARK]) if SPARK in found else 0.0
    for variant, runs in found.items():
        yield summary(variant, runs, base, records_per_batch=sizes[variant], records=choices.records)


def warmed_up(
    bench: Bench, source: str, sent: Sequence[tuple[bytes, bytes]], want: Expected, variant: str, choices: Choices
) -> int:
    """Run a variant for the first time. Returns how many records its batches shall have."""
    if variant in (RECORDS, COLUMNS):
        # So many as it does in a second, found in two steps; a run has three batches at least.
        size = choices.records // 10
        for _ in range(2):
            warm = run_variant(bench, source, variant, size, want)
            size = max(1000, min(round(warm.records_per_s / 1000) * 1000, choices.records // 3))
        return size
    often = variant in (RECORDS_OFTEN, COLUMNS_OFTEN)
    size = choices.often if often else min(choices.spark_records_per_batch, choices.records // 3)
    part = sent[: size * (10 if often else 3)]
    topic = bench.topic("bench-warm")
    bench.fill(topic, part)
    run_variant(bench, topic, variant, size, expected(part))
    bench.delete(topic)
    return size


def summary(variant: str, runs: Sequence[Measured], base: float, **more: Any) -> dict[str, Any]:
    """One line of the table."""
    rates = sorted(measured.records_per_s for measured in runs)
    total = sum(measured.records for measured in runs)
    cpu_s = {name: sum(measured.cpu_s[name] for measured in runs) for name in runs[0].cpu_s}
    own = sum(cpu_s[name] for name in ("driver", "jvm", "workers"))
    return {
        "bench": "state",
        "variant": variant,
        "guarantee": "at_least_once" if variant in (SPARK, SPARK_PANDAS) else "exactly_once",
        **more,
        "path": runs[-1].path,
        "records_per_s": round(statistics.median(rates)),
        "min_records_per_s": round(rates[0]),
        "max_records_per_s": round(rates[-1]),
        "ratio_to_transform_with_state": round(statistics.median(rates) / base, 2) if base else None,
        "commits": runs[-1].commits,
        "commit_ms_median": round(statistics.median(ms for measured in runs for ms in measured.batch_ms or [0.0])),
        "cpu_us_per_record": round(own / max(1, total) * 1e6, 1),
        "cpu_s_per_run": {name: round(seconds / len(runs), 2) for name, seconds in cpu_s.items()},
        **worker_memory([measured.meter for measured in runs]),
        "steps_ms_median": runs[-1].steps_ms,
        "correct": "; ".join(dict.fromkeys(measured.problem for measured in runs if measured.problem)) or "yes",
    }


class LogLines(logging.Handler):
    """What ``onceflow.state`` says while this is open."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._logger = logging.getLogger("onceflow.state")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> LogLines:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def restore(bench: Bench, keys: int) -> Iterator[dict[str, Any]]:
    """A table of so many keys loses its local copy; a batch by the driver brings it back, then one by tasks."""
    source, name = bench.topic("bench-keys"), f"bench-restore-{uuid.uuid4().hex[:6]}"
    yield fill_table(bench, name, source, keys)
    known = {b"acc-%07d" % account: (1, 1) for account in range(keys)}
    first_id = keys
    for how, records, write in (("driver", SMALL_BATCH, {}), ("tasks", TASK_BATCH, {"small_batch_rows": 0})):
        shutil.rmtree(bench.folder / name)
        accounts = range(0, keys, max(1, keys // records))
        sent = [payment(account, 5, first_id + turn) for turn, account in enumerate(accounts)]
        first_id += bench.fill(source, sent)
        want = expected(sent, known)
        known |= want[1]
        with bench.meter(f"restore {how}") as meter, LogLines() as log:
            batches, problem = update_table(bench, name, source, want, keys, **write)
            cpu_s = meter.cpu_s()
        restored, seconds = restored_of(log.lines)
        if not problem and bench.local_rows(name) != known:
            problem = "the local copy differs"
        step_s = batches[0].seconds["write"]
        yield {
            "bench": "restore",
            "how": f"{how} ({batches[0].path})",
            "keys": keys,
            "state_mib": bench.state_mib(name),
            "records_restored": restored,
            "records_per_s_of_a_process": round(restored / max(seconds, 1e-3)),
            "records_per_s": round(restored / max(step_s, 1e-3)),
            "step_s": round(step_s, 2),
            "cpu_s": {who: round(spent, 2) for who, spent in cpu_s.items()},
            **worker_memory([meter]),
            "correct": problem or "yes",
        }
    bench.delete(source, *table_topics(name))


def large(bench: Bench, choices: Choices) -> Iterator[dict[str, Any]]:
    """Ordinary batches over a large table: memory of a worker must not follow the table's size."""
    keys, source = choices.large_keys, bench.topic("bench-large")
    name = f"bench-large-{uuid.uuid4().hex[:6]}"
    yield fill_table(bench, name, source, keys)
    sent = [payment(account, 5, keys + turn) for turn, account in enumerate(some_accounts(choices.records, keys))]
    bench.fill(source, sent)
    want = expected(sent, {key: (1, 1) for key, _ in sent})
    per_batch = max(1000, choices.records // 10)
    with bench.meter("large") as meter:
        batches, problem = update_table(bench, name, source, want, per_batch, small_batch_rows=0)
    full = [batch for batch in batches[1:] if batch.max_rows * 2 >= per_batch]
    rates = [batch.max_rows / sum(batch.seconds.values()) for batch in full]
    yield {
        "bench": "large_table",
        "keys": keys,
        "state_mib": bench.state_mib(name),
        "records_per_batch": per_batch,
        "records_per_s": round(statistics.median(rates)) if rates else None,
        "steps_ms_median": steps_ms(batches),
        **worker_memory([meter]),
        "correct": problem or "yes",
    }
    bench.delete(source, *table_topics(name))


def fill_table(bench: Bench, name: str, source: str, keys: int) -> dict[str, Any]:
    """A table with one record for each key."""
    bench.say(f"filling a table of {keys:,} keys")
    # In no order: a store that is filled in the order of its keys is smaller, and faster, than it will ever be.
    bench.fill(source, (payment(account, 1, account) for account in shuffled(keys)))
    target = bench.topic("bench-out")
    with bench.meter("fill") as meter:
        query = bench.flow(name, source, target, ColumnBalance(), 100_000)
        wait(query)
    rate, _ = rate_of(batches_of(query.recentProgress))
    bench.delete(target)
    return {
        "bench": "fill",
        "keys": keys,
        "records_per_s": round(rate),
        "state_mib": bench.state_mib(name),
        "steps_ms_median": steps_ms(query.batches),
        **worker_memory([meter]),
    }


def update_table(
    bench: Bench, name: str, source: str, want: Expected, records_per_batch: int, **write: Any
) -> tuple[list[Any], str]:
    """Process what is new in the source. Returns the batches, and what is wrong with the outputs."""
    target = bench.topic("bench-out")
    query = bench.flow(name, source, target, ColumnBalance(), records_per_batch, **write)
    wait(query)
    problem = problem_of(bench.outputs(target), None, want)
    bench.delete(target)
    return query.batches, problem


def table_topics(name: str) -> tuple[str, str]:
    """The topics of a flow's table."""
    return f"{name}-table", f"{name}-table-internal"


def worker_memory(meters: Sequence[Meter]) -> dict[str, float | None]:
    """Peak MiB of a worker, None when there was none."""
    rss = [meter.rss_mib for meter in meters if meter.rss_mib is not None]
    anon = [meter.anon_mib for meter in meters if meter.anon_mib is not None]
    return {
        "max_worker_rss_mib": round(max(rss), 1) if rss else None,
        "max_worker_anon_mib": round(max(anon), 1) if anon else None,
    }
