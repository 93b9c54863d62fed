"""Sessions of the PostgreSQL sink: which names they use, which limits they have, and what their errors tell."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from onceflow import BatchAbortedError, FencedError, PostgresSink, ProgressConflictError
from onceflow.external import postgres as postgres_sink
from onceflow.external.sink import BatchAttempt
from onceflow.testing.postgres import LocalPostgres
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import committed, run
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
    assert found is not None and (found.generation, found.progress) == (attempt.generation + 1, "{}")
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
