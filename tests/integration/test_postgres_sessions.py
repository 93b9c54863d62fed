"""Sessions of the PostgreSQL sink: which names they use, which limits they have, and what their errors tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from onceflow import (
    BatchAbortedError,
    DeadlineExceededError,
    EnvironmentUnusableError,
    FencedError,
    PostgresSink,
    ProgressConflictError,
    SchemaError,
)
from onceflow.client.deadline import Deadline
from onceflow.driver.external.waiting import at_start, when_reached
from onceflow.external import postgres as postgres_sink
from onceflow.external.postgres_connection import completed, trouble_of
from onceflow.external.postgres_staging import check_driver
from onceflow.external.sink import BatchAttempt, UnavailableError
from onceflow.testing.postgres import LocalPostgres

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import run
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

_ROWS = pa.RecordBatch.from_pylist([{"k": n} for n in range(3)], pa.schema([("k", pa.int32())]))


def role_of(dsn: str, **defaults: Any) -> str:
    """A DSN of a role with these settings, in the same schema."""
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, f"CREATE ROLE r_{schema} LOGIN SUPERUSER")
    for name, value in defaults.items():
        run(dsn, f"ALTER ROLE r_{schema} SET {name} = {value}")
    return f"{dsn}&user=r_{schema}"


def begun(sink: PostgresSink, owner: str = "o") -> BatchAttempt:
    """A start, as the driver does it, and the first attempt of a batch."""
    sink.check(_ROWS.schema)
    sink.progress_row("f")
    attempt = BatchAttempt("f", owner, sink.open("f", owner, None).generation, 1, 1)
    sink.begin(attempt)
    return attempt


def write(sink: PostgresSink, attempt: BatchAttempt) -> None:
    sink.commit(attempt, [sink.write(attempt, "0", iter([_ROWS]))], "{}")


# ---- names -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(dsn: str, postgres: LocalPostgres) -> tuple[str, str, str]:
    """A DSN whose search path has two schemas, of which the first one does not exist yet; and their names."""
    last = postgres.schema().rsplit("%3D")[-1]
    run(dsn, f"CREATE TABLE {last}.t (k int)")
    return f"{postgres.dsn}?options=-csearch_path%3Dfirst_{last},{last}", f"first_{last}", last


@pytest.mark.parametrize("more", ["", "CREATE TABLE {}.onceflow_progress (LIKE {}.onceflow_progress INCLUDING ALL)"])
def test_a_schema_that_comes_later_hides_no_progress(path: tuple[str, str, str], more: str) -> None:
    """While a flow runs, and between two starts. Else it would begin again, and older drivers would not be fenced."""
    dsn, first, last = path
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    run(dsn, f"CREATE SCHEMA {first}", *[more.format(first, last)] * bool(more))
    write(sink, attempt)
    assert sink.open("f", "o", attempt.generation).generation == attempt.generation + 1
    sink.close()
    staged = (
        "SELECT count(*) FROM pg_class WHERE relname LIKE 'onceflow_staging%' AND relnamespace = '{}'::regnamespace"
    )
    assert run(dsn, staged.format(last)) == [(0,)]
    again = PostgresSink(dsn, "t")
    again.check(_ROWS.schema)
    found = again.progress_row("f")
    assert found is not None
    assert (found.generation, found.progress) == (attempt.generation + 1, "{}")
    newer = begun(again, "n")
    with pytest.raises(FencedError):
        sink.commit(attempt, [], "{}")
    write(again, newer)
    assert run(dsn, "SELECT count(*) FROM t") == [(6,)]
    assert run(dsn, f"SELECT generation FROM {last}.onceflow_progress") == [(attempt.generation + 2,)]
    again.close()


def test_a_flow_that_has_two_progress_rows(path: tuple[str, str, str]) -> None:
    dsn, first, last = path
    sink = PostgresSink(dsn, "t")
    write(sink, begun(sink))
    run(dsn, f"CREATE SCHEMA {first}", f"CREATE TABLE {first}.onceflow_progress AS TABLE {last}.onceflow_progress")
    with pytest.raises(ProgressConflictError, match=f"(?s)2 progress rows.*{first}.*{last}.*delete"):
        begun(sink)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_progress_table_of_an_administrator(path: tuple[str, str, str], hidden: bool) -> None:
    """In a schema where the user may not create tables; and behind one of other users, which it may not read."""
    dsn, first, last = path
    sink = PostgresSink(dsn, "t")
    write(sink, begun(sink))
    sink.close()
    user = f"ada_{last}"
    run(
        dsn,
        f"CREATE ROLE {user} LOGIN",
        f"CREATE SCHEMA {first}",
        f"GRANT USAGE, CREATE ON SCHEMA {first} TO {user}",
        f"GRANT USAGE ON SCHEMA {last} TO {user}",
        f"GRANT SELECT, INSERT, UPDATE ON {last}.t, {last}.onceflow_progress TO {user}",
        *[f"CREATE TABLE {first}.onceflow_progress (LIKE {last}.onceflow_progress)"] * hidden,
    )
    sink = PostgresSink(f"{dsn}&user={user}", "t")
    sink.check(_ROWS.schema)
    found = sink.progress_row("f")
    assert found is not None
    assert found.progress == "{}"
    write(sink, begun(sink))
    assert run(dsn, f"SELECT generation FROM {last}.onceflow_progress") == [(2,)]
    sink.close()


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER g BEFORE UPDATE ON onceflow_progress FOR EACH ROW EXECUTE FUNCTION f('none')",
        "CREATE TRIGGER g BEFORE UPDATE ON onceflow_progress FOR EACH ROW EXECUTE FUNCTION f('other')",
        "ALTER TABLE onceflow_progress ALTER progress TYPE jsonb USING progress::jsonb",
    ],
)
def test_a_progress_table_that_does_not_keep_what_is_written(dsn: str, change: str) -> None:
    """Rows that are committed without their progress would be written twice."""
    run(
        dsn,
        "CREATE TABLE t (k int)",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.progress := '[]'; "
        "RETURN CASE TG_ARGV[0] WHEN 'other' THEN NEW END; END $$",
    )
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    run(dsn, change)
    with pytest.raises(EnvironmentUnusableError, match="does not keep the progress of flow 'f'"):
        write(sink, attempt)
    assert run(dsn, "SELECT count(*) FROM t") == [(0,)]
    sink.close()


def test_a_progress_table_that_a_crash_empties(dsn: str) -> None:
    run(dsn, "CREATE TABLE t (k int)")
    sink = PostgresSink(dsn, "t")
    write(sink, begun(sink))
    sink.close()
    run(dsn, "ALTER TABLE onceflow_progress SET UNLOGGED")
    with pytest.raises(SchemaError, match=r"onceflow_progress is UNLOGGED: a crash of the server empties it"):
        sink.progress_row("f")
    sink.close()


def test_functions_mean_what_they_have_meant_at_the_start(path: tuple[str, str, str]) -> None:
    """Those that triggers call: a schema that comes later has other ones of the same name."""
    dsn, first, last = path
    run(
        dsn,
        f"CREATE FUNCTION {last}.twice(int) RETURNS int LANGUAGE sql RETURN 2 * $1",
        f"CREATE FUNCTION {last}.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.k = twice(NEW.k); RETURN NEW; END'",
        f"CREATE TRIGGER g BEFORE INSERT ON {last}.t FOR EACH ROW EXECUTE FUNCTION {last}.f()",
    )
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    run(dsn, f"CREATE SCHEMA {first}", f"CREATE FUNCTION {first}.twice(int) RETURNS int LANGUAGE sql RETURN 7")
    write(sink, attempt)
    assert run(dsn, f"SELECT k FROM {last}.t ORDER BY 1") == [(0,), (2,), (4,)]


def test_nothing_is_prepared_in_a_session(dsn: str) -> None:
    """Behind a pooler, the next transaction may have another session of the server, which lacks it."""
    run(dsn, "CREATE TABLE t (k int PRIMARY KEY)")
    sink = PostgresSink(dsn, "t", mode="upsert", key="k")
    attempt = begun(sink)
    for _ in range(8):
        write(sink, attempt)
    assert sink._connection is not None
    assert sink._connection.execute("SELECT statement FROM pg_prepared_statements").fetchall() == []
    sink.close()


# ---- limits ----------------------------------------------------------------------------------------------


def busy(attempt: BatchAttempt, sink: PostgresSink, receipts: list[bytes], seconds: float) -> None:
    """Commit, while this process is busy with the refused rows for so long."""

    def progress(refused: Any) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        return str(len(refused))

    sink.commit_accepted(attempt, receipts, progress)


@pytest.mark.long
def test_a_driver_that_is_busy_in_a_transaction(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million refused rows, for example. The server would end the transaction, in every attempt."""
    monkeypatch.setattr(postgres_sink, "_LOCK_S", 1)
    run(dsn, "CREATE TABLE t (k int CHECK (k <> 1))")
    sink = PostgresSink(role_of(dsn, idle_in_transaction_session_timeout="'200ms'"), "t")
    sink.set_aside()
    attempt = begun(sink)
    busy(attempt, sink, [sink.write(attempt, "0", iter([_ROWS]))], 3)
    assert run(dsn, "SELECT k FROM t ORDER BY 1") == [(0,), (2,)]
    assert run(dsn, "SELECT progress FROM onceflow_progress") == [("1",)]
    sink.close()


@pytest.mark.long
def test_a_session_that_is_idle_while_tasks_work(dsn: str) -> None:
    """And a task that is: it waits for rows within its COPY."""
    run(dsn, "CREATE TABLE t (k int)")
    limits = {"idle_session_timeout": "'1s'", "idle_in_transaction_session_timeout": "'1s'"}
    sink = PostgresSink(role_of(dsn, **limits), "t")
    attempt = begun(sink)

    def slowly() -> Iterator[pa.RecordBatch]:
        for _ in range(3):
            time.sleep(0.8)
            yield _ROWS

    sink.commit(attempt, [sink.write(attempt, "0", slowly())], "{}")
    assert run(dsn, "SELECT count(*) FROM t") == [(9,)]
    sink.close()


def test_no_setting_stays_in_a_session(dsn: str) -> None:
    """A pooler in transaction mode gives the session to other clients."""
    run(dsn, "CREATE TABLE t (k int)")
    changed = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY 1"
    with psycopg.connect(PostgresSink(dsn, "t")._dsn, autocommit=True) as other:
        before = other.execute(changed).fetchall()
    sink = PostgresSink(dsn, "t")
    write(sink, begun(sink))
    assert sink._connection is not None
    assert sink._connection.execute(changed).fetchall() == before
    sink.close()


def test_a_session_that_was_ended_while_it_was_idle(dsn: str) -> None:
    """By a limit, an administrator, or a restart of the server: the commit has another one."""
    run(dsn, "CREATE TABLE t (k int)")
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    receipt = sink.write(attempt, "0", iter([_ROWS]))
    assert sink._connection is not None
    pid = sink._connection.info.backend_pid
    run(dsn, f"SELECT pg_terminate_backend({pid}, 10000)")
    sink.commit(attempt, [receipt], "{}")
    assert run(dsn, "SELECT count(*) FROM t") == [(3,)]
    sink.close()


@pytest.mark.long_but("statement_timeout")
@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout"])
def test_limits_of_a_role_are_told(dsn: str, setting: str) -> None:
    """Of a statement in the commit, and of the COPY of a task."""
    run(
        dsn,
        "CREATE TABLE t (k int)",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'",
        "CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
    )
    sink = PostgresSink(role_of(dsn, **{setting: "'700ms'"}), "t")
    attempt = begun(sink)
    receipt = sink.write(attempt, "0", iter([_ROWS]))
    with pytest.raises((BatchAbortedError, ConnectionError), match=f"{setting} of the role"):
        sink.commit(attempt, [receipt], "{}")
    attempt = begun(sink)

    def slowly() -> Iterator[pa.RecordBatch]:
        yield _ROWS
        time.sleep(1.5)
        yield _ROWS

    with pytest.raises(BatchAbortedError, match=rf"(?s){setting} of the role.*ALTER ROLE \.\.\. SET {setting} = 0"):
        sink.write(attempt, "0", slowly())
    sink.close()


# ---- errors of a batch -----------------------------------------------------------------------------------


def test_a_batch_begins_at_a_server_that_cannot_write(dsn: str) -> None:
    """It has just become a standby, or its disk is full: the driver waits, as at a start, and does not use up the
    attempts of the batch."""
    run(dsn, "CREATE TABLE t (k int)")
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    assert sink._connection is not None
    sink._connection.execute("SET default_transaction_read_only = on")
    tried = 0

    def begin() -> None:
        nonlocal tried
        tried += 1
        sink.begin(attempt)

    when_reached(begin, Deadline(20, "reaching it"), sink.target, "orders", is_stopping=lambda: False)
    assert tried == 2  # with another connection, which may be one to another server
    write(sink, attempt)
    sink._connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(UnavailableError, match=r"read-only transaction.*it is a standby") as raised:
        sink.begin(attempt)
    assert "target_session_attrs=read-write" in raised.value.next_step
    sink.close()


def test_a_batch_begins_where_it_cannot(dsn: str) -> None:
    """What does not pass by itself is not waited for."""
    run(dsn, "CREATE TABLE t (k int)")
    sink = PostgresSink(dsn, "t")
    attempt = begun(sink)
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, f"ALTER SCHEMA {schema} RENAME TO {schema}_away")
    with pytest.raises((BatchAbortedError, SchemaError)):
        sink.begin(attempt)
    sink.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_task_cannot_connect(dsn: str, first: bool) -> None:
    """Its first connection in this process, and a later one. The batch is run again, and the reason is told."""
    run(dsn, "CREATE TABLE t (k int)")
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, f"CREATE ROLE few_{schema} LOGIN")
    run(dsn, f"GRANT ALL ON SCHEMA {schema} TO few_{schema}", f"GRANT ALL ON t TO few_{schema}")
    sink = PostgresSink(f"{dsn}&user=few_{schema}", "t")
    attempt = begun(sink)
    if first:
        check_driver.cache_clear()
    run(dsn, f"ALTER ROLE few_{schema} CONNECTION LIMIT 1")
    with pytest.raises(BatchAbortedError, match=r"(?s)could not be staged.*too many connections for role.*raise max_"):
        sink.write(attempt, "0", iter([_ROWS]))
    sink.close()
    away = PostgresSink(dsn, "t")
    attempt = begun(away)
    if first:
        check_driver.cache_clear()
    away._dsn = completed("host=127.0.0.1 port=1 dbname=postgres user=postgres")
    with pytest.raises(BatchAbortedError, match=r"(?s)could not be staged.*refused"):
        away.write(attempt, "0", iter([_ROWS]))
    away.close()


# ---- errors of a start -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
def test_a_takeover_that_waits_for_a_lock(dsn: str, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """The error says who holds it. It is no wrong login."""
    monkeypatch.setattr(postgres_sink, "_LOCK_S", 1)
    run(dsn, "CREATE TABLE t (k int)")
    sink = PostgresSink(role_of(dsn, **{setting: "'700ms'"}), "t")
    begun(sink)
    with psycopg.connect(dsn, application_name="nightly report") as other:
        pid = other.info.backend_pid
        other.execute("SELECT * FROM onceflow_progress FOR UPDATE")
        with pytest.raises(DeadlineExceededError) as raised:
            at_start(lambda: sink.open("f", "n", None), Deadline(1.2, "the start"), sink.target, "orders")
    error = raised.value
    assert error.what == "PostgreSQL table t cannot be used at the moment"
    assert f"locks are held by pid {pid} of user postgres (nightly report), idle in" in error.detail
    cure = "pg_terminate_backend(pid)" if setting == "lock_timeout" else "SET statement_timeout = 0"
    assert cure in error.next_step
    assert sink.open("f", "n", None).generation == 2
    sink.close()


def test_what_refuses_a_start(dsn: str) -> None:
    """Each error has its own next step. What may be over soon is waited for."""
    run(dsn, "CREATE TABLE t (k int)")

    def start(sink: PostgresSink) -> None:
        try:
            begun(sink)
        finally:
            sink.close()

    read_only = role_of(dsn, default_transaction_read_only="on")
    for where in read_only, f"{read_only}&target_session_attrs=read-write":
        with pytest.raises(UnavailableError, match=r"read-only.*it is a standby, or default_transaction_read_only"):
            start(PostgresSink(where, "t"))
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, f"CREATE ROLE few_{schema} LOGIN CONNECTION LIMIT 0", f"CREATE ROLE none_{schema}")
    run(dsn, f"GRANT ALL ON SCHEMA {schema} TO few_{schema}", f"GRANT ALL ON t TO few_{schema}")
    for limit in 0, 1:  # with one, the driver for COPY has none
        run(dsn, f"ALTER ROLE few_{schema} CONNECTION LIMIT {limit}")
        with pytest.raises(UnavailableError, match="too many connections for role"):
            start(PostgresSink(f"{dsn}&user=few_{schema}", "t"))
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)not permitted to log in.*check the address, the login"):
        at_start(
            lambda: start(PostgresSink(f"{dsn}&user=none_{schema}", "t")), Deadline(9, "the start"), "PostgreSQL", "f"
        )
    run(dsn, "CREATE TABLE onceflow_progress (flow text, offsets text)")
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)column \"generation\" does not exist.*other columns"):
        start(PostgresSink(dsn, "t"))


@pytest.mark.parametrize("attrs", ["", "any", "read-write"])
@pytest.mark.parametrize("given", ["dsn", "environment"])
def test_a_connection_that_fails_once(dsn: str, monkeypatch: pytest.MonkeyPatch, attrs: str, given: str) -> None:
    """It is tried again. Nobody looks for a standby where any server will do."""
    if attrs and given == "environment":
        monkeypatch.setenv("PGTARGETSESSIONATTRS", attrs)
    elif attrs:
        dsn += f"&target_session_attrs={attrs}"
    run(dsn, "CREATE TABLE t (k int)")
    connect, failures = psycopg.connect, iter(["server closed the connection unexpectedly"])

    def once(*given: Any, **options: Any) -> psycopg.Connection[Any]:
        for text in failures:
            raise psycopg.OperationalError(text)
        return connect(*given, **options)

    monkeypatch.setattr(psycopg, "connect", once)
    sink = PostgresSink(dsn, "t")
    with pytest.raises(UnavailableError, match="server closed the connection unexpectedly") as raised:
        sink.check(_ROWS.schema)
    assert ("it is a standby" in str(raised.value)) == (attrs == "read-write")
    sink.check(_ROWS.schema)
    sink.close()


def test_all_classes_of_errors_have_a_next_step() -> None:
    """Of those that may come at a start. Faults of the server do not pass by themselves; conflicts and outages do."""
    classes = [each for each in vars(psycopg.errors).values() if isinstance(each, type)]
    codes = {each.sqlstate for each in classes if isinstance(getattr(each, "sqlstate", None), str)}
    of_server = {code: trouble_of(code, "text") for code in codes if code[:2] in ("08", "40", "53", "57", "55")}
    assert len(of_server) > 25
    for code, trouble in of_server.items():
        assert trouble.passes or code in ("55000", "55P02", "55P04", "57P04"), code
        assert trouble.next_step
    for code in ("58030", "XX001", "F0000", "42703", "3F000"):
        assert not trouble_of(code, "text").passes
