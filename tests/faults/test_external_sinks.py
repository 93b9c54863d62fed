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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from sqlite_sink import SqliteSink

import onceflow
from onceflow import hooks
from onceflow.admin.change.reset import reset
from onceflow.admin.records import tables
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.protocol.names import Names
from onceflow.testing import faults, independent
from onceflow_workshop.testing.s3 import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_LEDGER = (
    'CREATE TABLE ledger (topic, "partition" INT, "offset" INT, value, attempt, PRIMARY KEY ("partition", "offset")'
)


_DELTA_LEDGER = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("value", pa.string()),
        ("attempt", pa.string()),
    ]
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
    letters_class = b"IntegrityError"

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
        assert {dict(letter.headers)["onceflow.error.class"] for letter in letters} <= {self.letters_class}
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

    options: dict[str, str] = field(default_factory=dict)
    letters_class = b"CheckViolation"

    def table(self) -> DeltaTable | None:
        root = str(self.database)
        there = DeltaTable.is_deltatable(root, self.options)
        return DeltaTable(root, storage_options=self.options) if there else None

    def rows(self) -> list[Any]:
        table = self.table()
        if table is None:
            return []
        found = table.to_pyarrow_table(columns=["partition", "offset", "value"])
        return [tuple(row.values()) for row in found.to_pylist()]

    def progress(self) -> dict[str, Any]:
        table = self.table()
        cluster = AdminClient({"bootstrap.servers": self.pipe.bootstrap}).list_topics(timeout=60).cluster_id
        number = None if table is None else table.transaction_version(f"onceflow.{self.flow}@{cluster}")
        progress = None if number is None else json.loads(self.entry(number))["progress"]
        return json.loads(progress) if progress else {}

    def entry(self, number: int) -> bytes:
        (path,) = Path(self.database).glob(f"_onceflow/*/{number:020d}-*.json")
        return path.read_bytes()


@dataclass
class Bucket(Delta):
    """The same in a bucket."""

    server: S3Server | None = None

    def arguments(self, **options: Any) -> dict[str, Any]:
        return super().arguments(storage=self.options, **options)

    def entry(self, number: int) -> bytes:
        assert self.server is not None
        files = self.server.filesystem()
        root = str(self.database).removeprefix("s3://")
        (path,) = files.glob(f"{root}/_onceflow/*/{number:020d}-*.json")
        content: bytes = files.cat_file(path)
        return content


@pytest.fixture
def make_external(
    make_pipe: Callable[..., Any],
    make_topic: Callable[..., str],
    external_flow: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Callable[..., External]:
    """``make_external()``: an empty topic, an empty target and a flow name. ``letters``: it refuses some rows."""

    def make(kind: type[External] = External, *, letters: bool = False) -> External:
        pipe = make_pipe()
        if kind is Delta:
            folder = tmp_path / f"{pipe.flow}.delta"
            if letters:
                table = DeltaTable.create(folder, _DELTA_LEDGER)
                table.alter.add_constraint({"seventh": '"offset" % 7 <> 3'})
            return Delta(pipe, folder, external_flow, make_topic(partitions=2) if letters else None)
        if kind is Bucket:
            server = request.getfixturevalue("s3")
            root = f"s3://{server.make_bucket()}/lake/table.delta"
            options = {**server.environment, "AWS_ALLOW_HTTP": "true"}
            return Bucket(pipe, root, external_flow, options=options, server=server)
        path = tmp_path / f"{pipe.flow}.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(_LEDGER + (', CHECK ("offset" % 7 <> 3))' if letters else ")"))
        return External(pipe, path, external_flow, make_topic(partitions=2) if letters else None)

    return make


def engine_of(step: str) -> str:
    """Odd and even steps take the two ways to write in turn."""
    return "tasks" if hooks.EXTERNAL_STEPS.index(step.partition(" ")[0]) % 2 else "driver"


def known_to_collections(servers: str) -> set[str]:
    """Flows of which a collection of a claim check knows that they write another system."""

    def unreadable(key: str, error: onceflow.OnceflowError) -> None:
        """Other tests leave such records."""

    with closing(Cluster(ClientSettings(servers))) as cluster:
        found = tables.possible_progress(cluster, Deadline(60, "reading progress"), unreadable=unreadable)
        return {each.flow for each in found if each.external}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, steps",
    [
        (External, (*hooks.EXTERNAL_STEPS, "commit first")),
        (Delta, hooks.EXTERNAL_STEPS),
        (Bucket, hooks.EXTERNAL_STEPS),
    ],
)
def test_driver_killed(
    make_external: Callable[..., External], killed_together: Any, kind: type[External], steps: tuple[str, ...]
) -> None:
    """One SIGKILL meets the flows of one driver, each at another step. Rows of databases become dead letters.

    ``commit first``: the first batch is in the database, and Kafka has no progress of it.
    """
    flows = {step: make_external(kind, letters=kind is not Bucket) for step in steps}
    for flow in flows.values():
        flow.pipe.fill(1500)
    options = {step: {"write": {"engine": engine_of(step)}} for step in flows}
    killed_together(flows, options, batches={"commit first": 1})
    known = known_to_collections(next(iter(flows.values())).pipe.bootstrap)
    for step, flow in flows.items():
        flow.check_rows_iff_progress()
        assert flow.flow in known or step == "init", step
        reached = flow.progress().get("batch_id", 0)
        assert reached == {"init": 0, "commit": 2, "progress": 2, "end": 2, "settle": 2}.get(step, 1), step
        followed = flow.pipe.committed_progress()
        # What is open in the progress topic hides what other flows have written there after it.
        assert (followed[-1].batch_id if followed else 0) <= reached - (
            step in ("commit", "commit first", "progress")
        ), step

    def recover(step: str) -> None:
        flows[step].pipe.fill(500)
        flows[step].run(write={"engine": engine_of(step)})

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
            flow.run(write={"engine": "driver" if engine_of(step) == "tasks" else "tasks"}, records_per_batch=400)
        flow.check_rows_iff_progress()
    flow.run()
    flow.check()


@pytest.mark.long
@pytest.mark.parametrize("kind", [External, Delta])
def test_workers_die(make_external: Callable[..., External], inject: Any, kind: type[External]) -> None:
    """The rows of a task are there, then its worker dies: only those of the second attempt are committed."""
    flow = make_external(kind)
    flow.pipe.fill(1500)
    inject("write", "kill", where="task", batch=2, times=1, once_file=str(Path(flow.database).with_suffix(".fired")))
    query = flow.run(write={"engine": "tasks"})
    assert max(batch.attempts for batch in query.batches) > 1
    flow.check()


@pytest.mark.long_but("False")
@pytest.mark.parametrize("applied", [True, False])
def test_the_answer_of_a_commit_is_lost(make_external: Callable[..., External], applied: bool) -> None:
    flow = make_external()
    flow.pipe.fill(1500)
    query = flow.run(sink=flow.module.LosesAnswers(flow.database, "ledger", applied=applied))
    assert sum(batch.attempts - 1 for batch in query.batches) == (0 if applied else 2)
    flow.check()


@pytest.mark.parametrize("kind", [pytest.param(External, marks=pytest.mark.long), Delta])
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_reset_writes_no_dead_letter_again(make_external: Callable[..., External], caplog: Any) -> None:
    """The progress row still decides, and its letters were written when its batch ended."""
    flow = make_external(letters=True)
    for _ in range(2):  # also if the row is at its first batch
        flow.pipe.fill(900)
        flow.run()
        assert flow.dead_letters()
        reset(ClientSettings(flow.pipe.bootstrap), Names(flow.flow), [flow.pipe.source])
        flow.run()
        flow.check()
        assert "dead letters of that batch are not written once more" in caplog.text
        caplog.clear()


@pytest.mark.long
def test_another_database_is_refused(make_external: Callable[..., External]) -> None:
    flow, other = make_external(), make_external()
    flow.pipe.fill(100)
    flow.run()
    flow.database = other.database
    with pytest.raises(onceflow.ProgressConflictError, match=rf"(?s)has no progress row.*onceflow\.{flow.flow}@"):
        flow.run()
    assert not flow.select("SELECT * FROM sqlite_master WHERE name = 'onceflow_progress'")


@pytest.mark.long
def test_flows_of_one_name_write_to_one_database(make_external: Callable[..., External]) -> None:
    """They have different prefixes. One starts, and is refused, while the other one runs."""
    one, two = make_external(), make_external()
    two.pipe.flow, two.database = one.flow, one.database
    with closing(sqlite3.connect(one.database)) as connection:
        connection.execute("CREATE TABLE other AS SELECT * FROM ledger")

    def opened(prefix: str, table: str) -> dict[str, Any]:
        prefixes = {"transactional_id_prefix": prefix, "group_id_prefix": prefix}
        return {"open": prefixes, "sink": SqliteSink(one.database, table)}

    def rows() -> list[int]:
        return [one.select(f"SELECT count(*) FROM {table}")[0][0] for table in ("ledger", "other")]

    one.pipe.fill(500)
    two.pipe.fill(300)
    running = one.start(**opened("a.", "ledger"))
    running.processAllAvailable()
    two.run(**opened("b.", "other"))
    assert rows() == [500, 300]
    with closing(sqlite3.connect(one.database)) as connection:
        connection.execute(
            "UPDATE onceflow_progress SET progress = json_set(progress, '$.batch_id', 9, ?, 'another') "
            "WHERE flow LIKE 'b.%'",
            [f'$.topic_ids."{two.pipe.source}"'],
        )
        connection.commit()
    before = one.select("SELECT flow, generation, owner FROM onceflow_progress ORDER BY flow")
    assert len(before) == 2
    with pytest.raises(onceflow.ProgressConflictError, match=rf"(?s)created again.*row 'b\.onceflow\.{one.flow}@"):
        two.run(**opened("b.", "other"))
    assert one.select("SELECT flow, generation, owner FROM onceflow_progress ORDER BY flow") == before
    one.pipe.fill(200)
    running.processAllAvailable()
    running.stop()
    one.run(**opened("a.", "ledger"))
    assert rows() == [700, 300]


@pytest.mark.long
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
