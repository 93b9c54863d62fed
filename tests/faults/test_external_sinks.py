"""Flows that write to a database, or to a table of Delta Lake: killed at every step, restarted, taken over, restored.
A row has the place of its record, so the target alone shows what was lost or written twice.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from sqlite_sink import SqliteSink

import onceflow
from onceflow import hooks
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_LEDGER = (
    'CREATE TABLE ledger (topic, "partition" INT, "offset" INT, value, attempt, PRIMARY KEY ("partition", "offset")'
)


def is_refused(offset: int) -> bool:
    """Whether the ledger of a flow with dead letters refuses the row of a record."""
    return offset % 7 == 3


@dataclass
class External:
    """A flow from a topic into the database, and what must be there."""

    pipe: Any
    database: Path | str
    module: Any
    letters: str | None = None

    @property
    def flow(self) -> str:
        return self.pipe.flow

    def arguments(self, **options: Any) -> dict[str, Any]:
        write = {**({} if self.letters is None else {"dead_letter_topic": self.letters}), **options.get("write", {})}
        return {**self.pipe.arguments(), "database": str(self.database), **options, "write": write}

    def start(self, **options: Any) -> Any:
        return self.module.start(self.arguments(**options), self.pipe.spark)

    def run(self, **options: Any) -> Any:
        query = self.start(**options)
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return query

    def select(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self.database, timeout=60)) as connection:
            return connection.execute(statement).fetchall()

    def rows(self) -> list[Any]:
        """Place and value of each row."""
        return self.select('SELECT "partition", "offset", value FROM ledger')

    def progress(self) -> dict[str, Any]:
        if not self.select("SELECT name FROM sqlite_master WHERE name = 'onceflow_progress'"):
            return {}
        found = self.select(f"SELECT progress FROM onceflow_progress WHERE flow LIKE '%.{self.flow}@%'")
        return json.loads(found[0][0]) if found and found[0][0] else {}

    def check_rows_iff_progress(self) -> None:
        offsets = self.progress().get("offsets", {}).get(self.pipe.source, {})
        rows = Counter(str(partition) for partition, _, _ in self.rows())
        expected = {
            partition: sum(1 for each in range(offset) if self.letters is None or not is_refused(each))
            for partition, offset in offsets.items()
        }
        assert rows == {partition: count for partition, count in expected.items() if count}

    def dead_letters(self) -> list[tuple[int, int, str]]:
        """Place and value of the records that have become dead letters."""
        if self.letters is None:
            return []
        letters = independent.read_topic(self.pipe.bootstrap, self.letters, decided=True)
        rows = [json.loads(letter.value or b"") for letter in letters]
        assert {dict(letter.headers)["onceflow.error.class"] for letter in letters} <= {b"IntegrityError"}
        return [(row["partition"], row["offset"], row["value"]) for row in rows]

    def check(self) -> None:
        """Every record has one row, and all who look at progress see the same."""
        sent = {
            (record.partition, record.offset): (record.value or b"").decode()
            for record in independent.read_topic(self.pipe.bootstrap, self.pipe.source)
        }
        rows = self.rows()
        letters = self.dead_letters()
        assert sorted((*rows, *letters)) == sorted((*place, value) for place, value in sent.items())
        assert {is_refused(offset) for _, offset, _ in letters} <= {True}
        self.check_rows_iff_progress()
        ends = independent.end_offsets(self.pipe.bootstrap, self.pipe.source)
        assert independent.committed_offsets(self.pipe.bootstrap, self.flow) == ends
        assert self.pipe.committed_progress()[-1].batch_id == self.progress()["batch_id"]


@dataclass
class Delta(External):
    """The same with a table of Delta Lake. Its own reader says which rows and which entry are committed."""

    def rows(self) -> list[Any]:
        if not DeltaTable.is_deltatable(str(self.database)):
            return []
        found = DeltaTable(self.database).to_pyarrow_table(columns=["partition", "offset", "value"])
        return [tuple(row.values()) for row in found.to_pylist()]

    def progress(self) -> dict[str, Any]:
        if not DeltaTable.is_deltatable(str(self.database)):
            return {}
        number = DeltaTable(self.database).transaction_version(f"onceflow.{self.flow}")
        if number is None:
            return {}
        (entry,) = Path(self.database).glob(f"_onceflow/{self.flow}/*/{number:020d}.json")
        progress = json.loads(entry.read_text())["progress"]
        return json.loads(progress) if progress else {}


@pytest.fixture
def make_external(
    make_pipe: Callable[..., Any],
    make_topic: Callable[..., str],
    external_flow: Any,
    tmp_path: Path,
) -> Callable[..., External]:
    """``make_external()``: an empty topic, an empty target and a flow name. ``letters``: it refuses some rows."""

    def make(kind: type[External] = External, *, letters: bool = False) -> External:
        pipe = make_pipe()
        if kind is Delta:
            return Delta(pipe, tmp_path / f"{pipe.flow}.delta", external_flow)
        path = tmp_path / f"{pipe.flow}.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(_LEDGER + (', CHECK ("offset" % 7 <> 3))' if letters else ")"))
        return External(pipe, path, external_flow, make_topic(partitions=2) if letters else None)

    return make


def rows_of(step: str) -> int:
    """Odd and even steps take the two ways to write in turn."""
    return 0 if hooks.EXTERNAL_STEPS.index(step) % 2 else 4000


@pytest.mark.parametrize(
    "kind, steps",
    [
        (External, ("write", "commit", "progress", "settle")),
        pytest.param(External, hooks.EXTERNAL_STEPS, marks=pytest.mark.long),
        pytest.param(Delta, hooks.EXTERNAL_STEPS, marks=pytest.mark.long),
    ],
)
def test_driver_killed(
    make_external: Callable[..., External], killed_together: Any, kind: type[External], steps: tuple[str, ...]
) -> None:
    """One SIGKILL meets the flows of one driver, each at another step. Rows of databases become dead letters."""
    flows = {step: make_external(kind, letters=kind is External) for step in steps}
    for flow in flows.values():
        flow.pipe.fill(1500)
    killed_together(flows, {step: {"write": {"small_batch_rows": rows_of(step)}} for step in flows})
    for step, flow in flows.items():
        flow.check_rows_iff_progress()
        reached = flow.progress().get("batch_id", 0)
        assert reached == {"init": 0, "commit": 2, "progress": 2, "end": 2, "settle": 2}.get(step, 1), step
        followed = flow.pipe.committed_progress()
        # What is open in the progress topic hides what other flows have written there after it.
        assert (followed[-1].batch_id if followed else 0) <= reached - (step in ("commit", "progress")), step

    def recover(step: str) -> None:
        flows[step].pipe.fill(500)
        flows[step].run(write={"small_batch_rows": rows_of(step)})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(recover, flows))
    for flow in flows.values():
        flow.check()


@pytest.mark.long
def test_exception(make_external: Callable[..., External], inject: Any) -> None:
    """In one flow: what follows a failed batch fails itself, at the next step."""
    flow = make_external()
    for step in hooks.EXTERNAL_STEPS:
        flow.pipe.fill(1200)
        done = flow.progress().get("batch_id", 0)
        inject(step, "raise", **({} if step == "init" else {"batch": done + 2}))
        with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
            flow.run(write={"small_batch_rows": 4000 - rows_of(step)}, records_per_batch=400)
        flow.check_rows_iff_progress()
    flow.run()
    flow.check()


@pytest.mark.parametrize("kind", [External, Delta])
def test_workers_die(make_external: Callable[..., External], inject: Any, kind: type[External]) -> None:
    """The rows of a task are there, then its worker dies: only those of the second attempt are committed."""
    flow = make_external(kind)
    flow.pipe.fill(1500)
    inject("write", "kill", where="task", batch=2, times=1, once_file=str(Path(flow.database).with_suffix(".fired")))
    query = flow.run(write={"small_batch_rows": 0})
    assert max(batch.attempts for batch in query.batches) > 1
    flow.check()


@pytest.mark.parametrize("applied", [True, False])
def test_the_answer_of_a_commit_is_lost(make_external: Callable[..., External], applied: bool) -> None:
    flow = make_external()
    flow.pipe.fill(1500)
    query = flow.run(sink=flow.module.LosesAnswers(flow.database, "ledger", applied=applied))
    assert sum(batch.attempts - 1 for batch in query.batches) == (0 if applied else 2)
    flow.check()


@pytest.mark.parametrize("kind", [External, Delta])
def test_a_second_driver_takes_over(make_external: Callable[..., External], kind: type[External]) -> None:
    flow = make_external(kind)
    flow.pipe.fill(500)
    first = flow.start()
    first.processAllAvailable()
    second = flow.start()
    flow.pipe.fill(500)
    second.processAllAvailable()
    with pytest.raises(onceflow.FencedError, match="newer driver"):
        first.awaitTermination(60)
    second.stop()
    flow.check()


def test_an_older_state_of_the_database_is_restored(make_external: Callable[..., External], caplog: Any) -> None:
    flow = make_external()
    flow.pipe.fill(900)
    flow.run()
    database = Path(flow.database)
    backup = database.read_bytes()
    flow.pipe.fill(900)
    flow.run()
    database.write_bytes(backup)
    flow.run()
    flow.check()
    assert "an older state of" in caplog.text


def test_another_database_is_refused(make_external: Callable[..., External]) -> None:
    flow, other = make_external(), make_external()
    flow.pipe.fill(100)
    flow.run()
    flow.database = other.database
    with pytest.raises(onceflow.ProgressConflictError, match="has no progress row"):
        flow.run()


def test_two_topics(make_external: Callable[..., External], inject: Any) -> None:
    """The driver dies before Kafka's progress has followed: both topics continue at the progress row."""
    flow, other = make_external(), make_external()
    topics = sorted((flow.pipe.source, other.pipe.source), reverse=True)
    with closing(sqlite3.connect(flow.database)) as connection:
        connection.execute('CREATE TABLE both_topics (topic, "partition" INT, "offset" INT)')

    def run() -> None:
        with onceflow.Flow(flow.flow, flow.pipe.spark, bootstrap_servers=flow.pipe.bootstrap) as reader:
            one, two = (reader.read(topic, max_records_per_batch=200) for topic in topics)
            rows = one.union(two).select("topic", "partition", "offset")
            query = reader.write_external(rows, SqliteSink(flow.database, "both_topics"), once=True).start()
            query.awaitTermination(120)

    for each in (flow, other):
        each.pipe.fill(500)
    inject("commit", "raise", batch=2)
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        run()
    assert flow.progress()["batch_id"] == flow.pipe.committed_progress()[-1].batch_id + 1
    run()
    seen = [(each.pipe.source, r.partition, r.offset) for each in (flow, other)
            for r in independent.read_topic(flow.pipe.bootstrap, each.pipe.source)]  # fmt: skip
    assert sorted(flow.select('SELECT topic, "partition", "offset" FROM both_topics')) == sorted(seen)


def test_what_is_wrong_is_told_at_the_start(make_external: Callable[..., External]) -> None:
    flow = make_external()
    flow.pipe.fill(10)
    sink = SqliteSink(flow.database, "ledgers")
    with pytest.raises(onceflow.SchemaError, match="no table 'ledgers'"):
        flow.run(sink=sink)
    with pytest.raises(onceflow.OptionError, match="takes an ExternalSink, not str"):
        flow.run(sink="ledger")
    flow.run()
    flow.check()


def test_a_row_that_is_refused_stops_the_flow(make_external: Callable[..., External]) -> None:
    flow = make_external()
    flow.pipe.fill(10)
    with closing(sqlite3.connect(flow.database)) as connection:
        connection.execute("CREATE TRIGGER t BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'not today'); END")
        connection.commit()
    with pytest.raises(onceflow.BadRecordError, match=f"(?s){flow.flow}.*not today.*'offset': 0"):
        flow.run()
    flow.check_rows_iff_progress()
    with closing(sqlite3.connect(flow.database)) as connection:
        connection.execute("DROP TRIGGER t")
        connection.commit()
    flow.run()
    flow.check()
