"""A real PostgreSQL and a real flow, and everything that may happen to either of them in the middle of a batch.

The table has no unique index, so a row that is there twice is seen. Rows are compared with what another Kafka client
reads.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException

import onceflow
from onceflow import hooks
from onceflow.external import postgres as postgres_sink
from onceflow.testing import independent
from onceflow.testing.postgres import LocalPostgres
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.postgres_proxy import PostgresProxy

pytestmark = [pytest.mark.integration, pytest.mark.faults]

_LEDGER = 'CREATE TABLE ledger (topic text, "partition" int, "offset" bigint, value text, attempt text)'


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LocalPostgres]:
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def server(shared_server: LocalPostgres) -> Iterator[LocalPostgres]:
    """A server that runs, and runs again after the test."""
    yield shared_server
    if shared_server.pid is None:
        shared_server.start()


@dataclass
class Ledger:
    """A flow from a topic into a table, and what must be there."""

    pipe: Any
    dsn: str
    module: Any

    @property
    def flow(self) -> str:
        return str(self.pipe.flow)

    def arguments(self, **options: Any) -> dict[str, Any]:
        return {**self.pipe.arguments(), "database": self.dsn, **options}

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
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def progress(self) -> dict[str, Any]:
        if self.select("SELECT to_regclass('onceflow_progress')") == [(None,)]:
            return {}
        found = self.select(f"SELECT progress FROM onceflow_progress WHERE flow LIKE '%.{self.flow}@%'")
        return json.loads(found[0][0]) if found and found[0][0] else {}

    def check_rows_iff_progress(self) -> None:
        offsets = self.progress().get("offsets", {}).get(self.pipe.source, {})
        rows = {str(partition): count for partition, count in self.select(_COUNTS)}
        assert rows == {partition: offset for partition, offset in offsets.items() if offset}

    def check(self) -> None:
        """Every record has one row, and all who look at progress see the same."""
        sent = Counter(
            (record.partition, record.offset, (record.value or b"").decode())
            for record in independent.read_topic(self.pipe.bootstrap, self.pipe.source)
        )
        assert Counter(self.select('SELECT "partition", "offset", value FROM ledger')) == sent
        self.check_rows_iff_progress()
        ends = independent.end_offsets(self.pipe.bootstrap, self.pipe.source)
        assert independent.committed_offsets(self.pipe.bootstrap, self.flow) == ends
        assert self.pipe.committed_progress()[-1].batch_id == self.progress()["batch_id"]


_COUNTS = 'SELECT "partition", count(*) FROM ledger GROUP BY "partition"'


@pytest.fixture
def make_ledger(make_pipe: Callable[..., Any], external_flow: Any, server: LocalPostgres) -> Callable[..., Ledger]:
    """``make_ledger()``: an empty topic, an empty table in a schema of its own, and a flow name."""

    def make(dsn: str | None = None) -> Ledger:
        found = Ledger(make_pipe(), dsn or server.schema(), external_flow)
        with psycopg.connect(found.dsn) as connection:
            connection.execute(_LEDGER)
        return found

    return make


@contextlib.contextmanager
def at_steps(act: Callable[[str, int], None]) -> Iterator[None]:
    """``act(step, batch)`` whenever a driver in this process has done a step."""

    def observe(step: str, *, batch: int | None, **_: Any) -> None:
        act(step, batch or 0)

    forget = hooks.observe(observe)
    try:
        yield
    finally:
        forget()


# ---- the driver, and its tasks ---------------------------------------------------------------------------


@pytest.mark.long
def test_driver_killed(make_ledger: Callable[..., Ledger], killed_together: Any) -> None:
    """One SIGKILL meets eight flows of one driver, each at another step."""
    ledgers = {step: make_ledger() for step in hooks.EXTERNAL_STEPS}
    options = {step: {"write": {"engine": "driver" if n % 2 else "tasks"}} for n, step in enumerate(ledgers)}
    for ledger in ledgers.values():
        ledger.pipe.fill(1500)
    killed_together(ledgers, options)
    for step, ledger in ledgers.items():
        ledger.check_rows_iff_progress()
        reached = ledger.progress().get("batch_id", 0)
        assert reached == {"init": 0, "commit": 2, "progress": 2, "end": 2, "settle": 2}.get(step, 1), step

    def recover(step: str) -> None:
        ledgers[step].pipe.fill(500)
        ledgers[step].run(**options[step])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(recover, ledgers))
    for ledger in ledgers.values():  # now that no transaction of another flow hides the end of the progress topic
        ledger.check()


@pytest.mark.long
@pytest.mark.parametrize("step", ["begin", "write"])
@pytest.mark.parametrize("victim", ["worker", "server"])
def test_killed_while_tasks_write(
    make_ledger: Callable[..., Ledger], server: LocalPostgres, inject: Any, tmp_path: Path, step: str, victim: str
) -> None:
    ledger = make_ledger()
    ledger.pipe.fill(1500)
    fired, until = tmp_path / "fired", tmp_path / "until"
    if victim == "worker":
        inject(step, "kill", where="task", batch=2, once_file=str(fired))
    else:
        inject(step, "pause", where="task", batch=2, once_file=str(fired), until=str(until))

    def kill() -> None:
        wait_until(fired.exists, 60, "a task is at the step")
        server.kill()
        server.start()
        until.touch()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill if victim == "server" else lambda: None)
        query = ledger.run(write={"engine": "tasks"})
        killing.result()
    assert fired.exists()
    assert max(batch.attempts for batch in query.batches) > 1 or (victim, step) == ("server", "begin")
    ledger.check()


# ---- the server ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_server_killed_at_every_step(make_ledger: Callable[..., Ledger], server: LocalPostgres, engine: str) -> None:
    """One run, with a SIGKILL to all processes of the server after each step, in another batch each. The flow goes on
    by itself. What was staged is gone then: the tables for that are not logged."""
    ledger = make_ledger()
    ledger.pipe.fill(5000)
    killed: dict[str, int] = {}
    starting: list[threading.Timer] = []

    def kill(step: str, batch: int) -> None:
        if step in hooks.EXTERNAL_STEPS and step not in killed and batch not in killed.values():
            killed[step] = batch
            server.kill()
            starting.append(threading.Timer(0.3, server.start))  # so that the driver has to wait for it
            starting[-1].start()

    with at_steps(kill):
        query = ledger.run(write={"engine": engine})
    for each in starting:
        each.join()
    assert sorted(killed) == sorted(hooks.EXTERNAL_STEPS)
    attempts = {batch.batch: batch.attempts for batch in query.batches}
    assert attempts[killed["write"]] > 1
    assert attempts[killed["audit"]] > 1, "what was staged is gone"
    assert attempts[killed["commit"]] == attempts[killed["end"]] == 1
    ledger.check()


@pytest.mark.long
def test_a_server_that_stays_away(
    make_ledger: Callable[..., Ledger], server: LocalPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow gives up, and says so; a new start, too; later it continues."""
    monkeypatch.setattr("onceflow.driver.external.commit._FIND_OUT_S", 3.0)
    ledger = make_ledger()
    ledger.pipe.fill(1500)
    for step in ("plan", "audit"):

        def kill(at: str, batch: int, step: str = step) -> None:
            if at == step and batch > 1 and server.pid is not None:
                server.kill()

        with (
            at_steps(kill),
            pytest.raises(
                (StreamingQueryException, onceflow.OnceflowError),
                match="cannot be reached" if step == "plan" else "outcome of the commit is not known",
            ),
        ):
            ledger.run()
        if step == "plan":
            with pytest.raises(onceflow.DeadlineExceededError, match=rf"(?s)ledger cannot be reached.*{ledger.flow}"):
                ledger.start(open={"connect_timeout": "10 seconds"})
        server.start()
        ledger.check_rows_iff_progress()
        ledger.pipe.fill(100)
    ledger.run()
    ledger.check()


@pytest.mark.long
def test_a_server_is_restarted(make_ledger: Callable[..., Ledger], server: LocalPostgres) -> None:
    """As at a failover within a cluster: sessions are ended (57P01), nobody answers for two seconds."""
    ledger = make_ledger()
    ledger.pipe.fill(500)
    query = ledger.start()
    for turn in range(3):
        wait_until(lambda: ledger.progress(), 60, "the flow has begun")
        ledger.pipe.fill(1500)
        server.stop()
        threading.Event().wait(2 if turn else 0.2)
        server.start()
    query.processAllAvailable()
    query.stop()
    ledger.check()


# ---- a connection is lost in the commit ------------------------------------------------------------------


@pytest.mark.long_but("after-1")
@pytest.mark.parametrize("when, times", [("before", 1), ("after", 1), pytest.param("after", 3, marks=pytest.mark.long)])
def test_a_connection_is_lost_in_the_commit(
    make_ledger: Callable[..., Ledger], server: LocalPostgres, when: str, times: int, caplog: Any
) -> None:
    """Before the server has got the COMMIT, and after it: the driver cannot know which, and finds out. Also if the
    answers of the takeovers that find it out are lost: it must not take its own takeover for that of another driver."""
    ledger = make_ledger()
    ledger.pipe.fill(1500)
    with PostgresProxy(server.port) as proxy:
        direct = ledger.dsn
        ledger.dsn = direct.replace(f":{server.port}/", f":{proxy.port}/")

        def cut(step: str, batch: int) -> None:
            if (step, batch) == ("audit", 2) and not proxy.cuts:
                proxy.cut(when, times)

        with at_steps(cut):
            query = ledger.run()
        assert proxy.cuts == times
        ledger.dsn = direct
    assert {batch.batch: batch.attempts for batch in query.batches}[2] == (2 if when == "before" else 1)
    assert "the outcome of batch 2 in PostgreSQL table ledger is not known yet" in caplog.text
    ledger.check()


# ---- locks -----------------------------------------------------------------------------------------------


def waiting_for_a_lock(connection: psycopg.Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onceflow' AND wait_event_type = 'Lock'"
    ).fetchone()
    return bool(found and found[0])


@pytest.mark.long
def test_deadlock(make_ledger: Callable[..., Ledger], caplog: Any) -> None:
    """The flow and another session each wait for a row of the other one; the server ends the flow's transaction."""
    ledger = make_ledger()
    ledger.pipe.fill(400)
    with psycopg.connect(ledger.dsn) as connection:
        connection.execute("CREATE TABLE totals (id int PRIMARY KEY, number bigint)")
        connection.execute("INSERT INTO totals SELECT n, -1 FROM generate_series(0, 3) AS n")
    other = psycopg.connect(ledger.dsn)
    look = psycopg.connect(ledger.dsn, autocommit=True)
    with other, look, ledger.pipe.open() as flow:
        rows = flow.read(ledger.pipe.source).selectExpr("partition AS id", "offset AS number")
        writer = flow.write_external(rows, onceflow.PostgresSink(ledger.dsn, "totals", mode="upsert", key=["id"]))
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("UPDATE totals SET number = -2 WHERE id = 3")
        query = writer.start()
        wait_until(lambda: waiting_for_a_lock(look), 60, "the flow waits for a row")
        other.execute("UPDATE totals SET number = -2 WHERE id = 0")  # returns when the flow has lost
        other.commit()
        query.processAllAvailable()
        query.stop()
    assert query.batches[0].attempts == 2
    assert "deadlock detected" in caplog.text
    ends = independent.end_offsets(ledger.pipe.bootstrap, ledger.pipe.source)
    last = {partition: end - 1 for (_, partition), end in ends.items()}
    assert dict(ledger.select("SELECT id, number FROM totals")) == last


@pytest.mark.long
def test_a_table_is_locked(make_ledger: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """For longer than the flow waits: it says what it waits for. If it is locked too long, the flow stops."""
    monkeypatch.setattr(postgres_sink, "_LOCK_S", 1)
    ledger = make_ledger()
    ledger.pipe.fill(1200)
    other = psycopg.connect(ledger.dsn)
    with other:
        other.execute("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE")
        query = ledger.start()
        with pytest.raises(onceflow.BatchAbortedError, match=r"(?s)aborted 4 times.*session holds a lock"):
            query.awaitTermination(60)
        other.rollback()
        ledger.check_rows_iff_progress()
        caplog.clear()
        other.execute("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE")
        query = ledger.start()
        wait_until(lambda: "another session holds a lock" in caplog.text, 60, "the flow says so")
        other.rollback()
        query.processAllAvailable()
        query.stop()
    ledger.check()


# ---- an older state --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_standby_takes_over_that_lacks_a_commit(make_ledger: Callable[..., Ledger], caplog: Any) -> None:
    """Replication is not synchronous, the first server dies, the second one is promoted. A flow that ran on would leave
    a gap: it stops, and its next start writes the batch again."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(LocalPostgres())
        second = LocalPostgres()
        for each in second.data.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        first.run("pg_basebackup", "-D", str(second.data), "-R", "-c", "fast", "-d", first.dsn)
        stack.enter_context(second)
        both = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/postgres"
        both += "?target_session_attrs=read-write"
        ledger = make_ledger(both)
        ledger.pipe.fill(300)
        query = ledger.start()
        query.processAllAvailable()
        with (
            psycopg.connect(second.dsn, autocommit=True) as standby,
            psycopg.connect(first.dsn, autocommit=True) as primary,
        ):
            end = primary.execute("SELECT pg_current_wal_lsn()").fetchone()
            wait_until(
                lambda: standby.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", end).fetchone() == (True,),
                30,
                "the standby has everything",
            )
            standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            standby.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: primary.execute("SELECT count(*) FROM pg_stat_replication").fetchone() == (0,),
                30,
                "the standby gets nothing more",
            )
            ledger.pipe.fill(300)
            query.processAllAvailable()  # committed, and only on the first server
            first.kill()
            standby.execute("SELECT pg_promote()")
        ledger.pipe.fill(300)
        with pytest.raises(onceflow.ProgressConflictError, match="has gone back to an older state"):
            query.awaitTermination(60)
        assert ledger.select("SELECT count(*) FROM ledger") == [(300,)]
        ledger.check_rows_iff_progress()
        ledger.run()
        assert "an older state of PostgreSQL table ledger was restored" in caplog.text
        ledger.check()


# ---- a full disk -----------------------------------------------------------------------------------------


@pytest.fixture
def space(small_disk: Any, server: LocalPostgres) -> Iterator[Path]:
    """A folder of the small disk, at a place where the server's user gets to: pytest's folders are for one user."""
    if not small_disk.mounted:
        pytest.skip("the disk of another process can be filled only where one can be mounted")
    folder = Path(tempfile.mkdtemp(prefix="onceflow-small-"))
    subprocess.run(["mount", "--bind", str(small_disk.folder), str(folder)], check=True)
    try:
        for each in (folder, place := folder / "space"):
            each.mkdir(exist_ok=True)
            each.chmod(0o755)
        if server.user is not None:
            shutil.chown(place, server.user)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.long
@pytest.mark.parametrize("full", ["table", "staging"])
def test_full_disk(
    make_ledger: Callable[..., Ledger], server: LocalPostgres, small_disk: Any, space: Path, full: str
) -> None:
    """The table or the staging table has no room: the flow stops and says why, and continues when there is some."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small_{full} LOCATION '{space}'")
    ledger = make_ledger()
    if full == "table":
        with psycopg.connect(ledger.dsn) as connection:
            connection.execute(f"ALTER TABLE ledger SET TABLESPACE small_{full}")
    plain, ledger.dsn = (
        ledger.dsn,
        ledger.dsn + (f"%20-cdefault_tablespace%3Dsmall_{full}" if full == "staging" else ""),
    )
    ledger.pipe.fill(500)
    ledger.run()
    small_disk.fill(200_000)
    ledger.pipe.fill(8000)
    with pytest.raises(onceflow.BatchAbortedError, match=r"(?s)aborted 4 times.*No space left on device"):
        ledger.run(write={"engine": "tasks"}, records_per_batch=8000)
    ledger.check_rows_iff_progress()
    small_disk.mend()
    ledger.run()
    ledger.check()
    ledger.dsn = plain
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        name = connection.execute("SHOW search_path").fetchone()
        assert name is not None
        connection.execute(f"DROP SCHEMA {name[0]} CASCADE")
        connection.execute(f"DROP TABLESPACE small_{full}")


@pytest.mark.long
def test_no_room_for_the_write_ahead_log(
    make_ledger: Callable[..., Ledger], small_disk: Any, space: Path, caplog: Any
) -> None:
    """The server ends with PANIC while it commits a batch, and cannot recover before there is room. The flow waits."""
    other = LocalPostgres(settings={"max_wal_size": "32MB", "min_wal_size": "32MB", "checkpoint_timeout": "1h"})
    wal = other.data / "pg_wal"
    shutil.copytree(wal, space, dirs_exist_ok=True)
    shutil.rmtree(wal)
    wal.symlink_to(space)  # as with initdb --waldir
    space.chmod(0o700)
    if other.user is not None:
        for each in (space, *space.rglob("*")):
            shutil.chown(each, other.user)
    full: list[threading.Timer] = []

    def mend() -> None:
        wait_until(lambda: "PANIC" in other.log_file.read_text(), 60, lambda: f"a PANIC\n{other.log_tail()}")
        wait_until(lambda: "cannot be reached" in caplog.text or "not known yet" in caplog.text, 60, "the flow waits")
        small_disk.mend()
        other.kill()  # if it has not ended by itself
        other.start()

    def fill(step: str, batch: int) -> None:
        if (step, batch) == ("audit", 2) and not full:
            small_disk.fill(1_000_000)
            _use_up_segments(other.dsn)
            full.append(threading.Timer(0, mend))
            full[0].start()

    with other:
        ledger = make_ledger(other.schema())
        ledger.pipe.fill(3000)
        with at_steps(fill):
            query = ledger.run(write={"engine": "tasks"})
        full[0].join()
        assert "PANIC" in other.log_file.read_text()
        assert "No space left on device" in other.log_file.read_text()
        assert {batch.batch: batch.attempts for batch in query.batches}[2] > 1, "what was staged is gone"
        ledger.check()


def _use_up_segments(dsn: str) -> None:
    """Leave 20 kB in the last segment of the write-ahead log that exists."""
    position = "pg_current_wal_insert_lsn()"
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(
            f"SELECT max(name) > pg_walfile_name({position}) FROM pg_ls_waldir() WHERE name ~ '^[0-9A-F]{{24}}$'"
        ).fetchone() == (True,):
            connection.execute("SELECT pg_logical_emit_message(false, 'test', 'x')")
            connection.execute("SELECT pg_switch_wal()")
        connection.execute(
            f"SELECT pg_logical_emit_message(false, 'test', repeat('x', "
            f"greatest(16777216 - mod({position} - '0/0'::pg_lsn, 16777216) - 20000, 1)::int))"
        )


# ---- many columns, many rows -----------------------------------------------------------------------------

_MIDNIGHT = dt.datetime(2020, 1, 1)
#: Type of the column, Spark's expression, and what it must be for an offset.
_KINDS: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    ("boolean", "offset % 2 = 0", lambda n: n % 2 == 0),
    ("smallint", "smallint(offset - 100)", lambda n: n - 100),
    ("integer", "int(offset * 1000003)", lambda n: n * 1000003),
    ("bigint", "9007199254740993 + offset", lambda n: 9007199254740993 + n),
    ("real", "float(offset / 4)", lambda n: n / 4),
    ("double precision", "double(offset) / 3", lambda n: n / 3),
    ("numeric(20,5)", "cast(concat(offset, '.12345') AS decimal(20,5))", lambda n: Decimal(f"{n}.12345")),
    ("text", "concat('ü\\t', offset)", lambda n: f"ü\t{n}"),
    ("bytea", "binary(concat('b', offset))", lambda n: b"b%d" % n),
    ("date", "date_add(DATE'2020-01-01', int(offset))", lambda n: _MIDNIGHT.date() + dt.timedelta(n)),
    (
        "timestamptz",
        "timestamp_micros(1750000000000001 + offset)",
        lambda n: dt.datetime(2025, 6, 15, 15, 6, 40, 1, dt.timezone.utc) + dt.timedelta(microseconds=n),
    ),
    (
        "timestamp",
        "TIMESTAMP_NTZ'2020-01-01 00:00:00' + make_dt_interval(0, 0, 0, offset)",
        lambda n: _MIDNIGHT + dt.timedelta(seconds=n),
    ),
    ("int[]", "array(int(offset), null, -1)", lambda n: [n, None, -1]),
    ("text[]", "array('', string(offset))", lambda n: ["", str(n)]),
    ("jsonb", """concat('{"n": [', offset, ']}')""", lambda n: {"n": [n]}),
    ("uuid", "concat('00000000-0000-0000-0000-', lpad(offset, 12, '0'))", lambda n: uuid.UUID(int=int(str(n), 16))),
    ("varchar(6)", "string(offset)", str),
)


@pytest.mark.long
def test_fifty_columns(make_ledger: Callable[..., Ledger]) -> None:
    """Of all types that can be written, a fifth of the values null, by tasks and by the driver."""
    ledger = make_ledger()
    columns = [(f"c{n}", *_KINDS[n % len(_KINDS)]) for n in range(50)]
    with psycopg.connect(ledger.dsn) as connection:
        listed = ", ".join(f"{name} {kind}" for name, kind, _, _ in columns)
        connection.execute(f'CREATE TABLE wide ("partition" int, "offset" bigint, {listed})')
    select = [f"if((offset + {n}) % 5 = 0, null, {how}) AS {name}" for n, (name, _, how, _) in enumerate(columns)]
    for engine in ("tasks", "driver"):
        ledger.pipe.fill(1000)
        with ledger.pipe.open() as flow:
            rows = flow.read(ledger.pipe.source).selectExpr("partition", "offset", *select)
            query = flow.write_external(
                rows, onceflow.PostgresSink(ledger.dsn, "wide"), once=True, engine=engine
            ).start()
            query.awaitTermination(120)
    expected = [
        (
            r.partition,
            r.offset,
            *(None if (r.offset + n) % 5 == 0 else of(r.offset) for n, (*_, of) in enumerate(columns)),
        )
        for r in independent.read_topic(ledger.pipe.bootstrap, ledger.pipe.source)
    ]
    found = ledger.select('SELECT * FROM wide ORDER BY "partition", "offset"')
    assert found == sorted(expected, key=lambda row: row[:2])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_rows(make_ledger: Callable[..., Ledger], server: LocalPostgres, inject: Any, tmp_path: Path) -> None:
    """In large batches; a task's worker and the server die on the way."""
    ledger = make_ledger()
    ledger.pipe.fill(1_000_000)
    inject("write", "kill", where="task", batch=3, once_file=str(tmp_path / "fired"))

    def kill(step: str, batch: int) -> None:
        if (step, batch) == ("audit", 5) and not killed:
            killed.append(step)
            server.kill()
            server.start()

    killed: list[str] = []
    with at_steps(kill):
        query = ledger.run(records_per_batch=150_000, write={"engine": "tasks"})
    assert (tmp_path / "fired").exists()
    assert killed
    assert {batch.batch for batch in query.batches if batch.attempts > 1} == {3, 5}
    sent = independent.read_topic(ledger.pipe.bootstrap, ledger.pipe.source)
    folded = Counter[int]()
    for record in sent:
        folded[record.partition] += int(record.value or b"")
    assert ledger.select('SELECT count(*), count(DISTINCT ("partition", "offset")) FROM ledger') == [(1_000_000,) * 2]
    assert dict(ledger.select('SELECT "partition", sum(value::bigint)::bigint FROM ledger GROUP BY 1')) == folded
    assert ledger.select('SELECT count(*) FROM ledger WHERE "offset" < 0 OR attempt IS NULL') == [(0,)]
    ledger.check_rows_iff_progress()
