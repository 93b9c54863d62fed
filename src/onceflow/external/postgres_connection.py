"""Connections to PostgreSQL: their settings, and what their errors mean."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from onceflow.errors import OptionError

if TYPE_CHECKING:
    import psycopg

#: Unless the DSN has others: a connection whose other end has vanished is given up within a minute, not after hours.
_SETTINGS = {
    "connect_timeout": "10",
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "application_name": "onceflow",
}

#: Settings of a session that decide what a value means. They may come from the server's file, the database, the role,
#: the DSN, ``PGTZ`` and ``PGOPTIONS``. Rows must not depend on any of these, so all sessions have PostgreSQL's own
#: defaults, and UTC. (Appendix "Client Connection Defaults" of its manual.)
_PINNED = {
    "TimeZone": "UTC",
    "timezone_abbreviations": "Default",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "array_nulls": "on",
    "lc_monetary": "C",
    "xmloption": "content",
    "standard_conforming_strings": "on",
}

#: Classes of errors (of SQLSTATE) that no row is to blame for: the connection, the state of the transaction, conflicts
#: with other transactions, resources, operators, the system, its configuration, and faults of the server.
_NOT_OF_ROWS = ("08", "25", "40", "53", "57", "58", "F0", "XX")
#: Likewise: a lock was not available, a snapshot is too old, a foreign server cannot be reached.
_NOT_OF_ROWS_EITHER = ("55P03", "72000", "HV00N")
_CONFLICTS = "40"  # a trigger that raises one of these asks for another attempt
_FORBIDDEN = "42501"  # a missing permission; row level security has the same code


def connect(dsn: str, pinned: Mapping[str, str] | None = None) -> psycopg.Connection[Any]:
    """A new connection.

    Args:
        pinned: settings of the session that it has in addition to those of all sessions.

    Raises:
        ConnectionError: the server cannot be reached, or takes no connections at the moment.
        psycopg.OperationalError: it refuses this one.
    """
    import psycopg
    from psycopg.pq import Ping

    try:
        connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)  # a pooler may change the session
        pin(connection, pinned or {}, local=False)
    except psycopg.OperationalError as error:
        # A server that takes connections, but not this one, will not change its mind soon.
        if psycopg.pq.PGconn.ping(dsn.encode()) == Ping.OK:
            raise
        raise ConnectionError(" ".join(str(error).split())) from error
    return connection


def pin(connection: psycopg.Connection[Any], settings: Mapping[str, str], *, local: bool) -> None:
    """Set the settings that all sessions have, and others.

    Args:
        local: for the transaction only. A pooler may have given it another session than the last one.
    """
    wanted = {**_PINNED, **settings}
    connection.execute(
        "SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[]) AS pinned (name, value)",
        [local, [*wanted], [*wanted.values()]],
    )


def completed(dsn: str) -> str:
    """The same with the settings of connections that it does not have. Text is always sent in UTF-8."""
    import psycopg
    from psycopg import conninfo

    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # its text has parts of the DSN, such as a password
        raise OptionError(
            "dsn= is not understood",
            next_step="it is postgresql://user:password@host/database, or host=... dbname=... user=...",
        ) from None
    return conninfo.make_conninfo("", **{**_SETTINGS, **given, "client_encoding": "UTF8"})


def dataset_of(dsn: str, table: str) -> tuple[str, str]:
    """See `ExternalSink.dataset`. What a DSN does not have is as libpq assumes it."""
    from psycopg import conninfo

    given = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items()}
    user = given.get("user") or os.environ.get("PGUSER") or "postgres"
    host = given.get("host") or os.environ.get("PGHOST") or "localhost"
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    database = given.get("dbname") or os.environ.get("PGDATABASE") or user
    schema, _, name = table.rpartition(".")
    return f"postgres://{host}:{port}", f"{database}.{schema or 'public'}.{name}"


def may_be_of_a_row(error: psycopg.Error) -> bool:
    """Whether a row may be the cause of an error.

    It may for every error that is not known to be of the connection or the server: constraints, types, triggers, views
    and policies have hundreds of codes, and functions raise codes of their own.
    """
    code = error.sqlstate or ""
    function = error.diag.source_function or ""  # of the server's source; unlike texts it is not translated
    if function == "exec_stmt_raise":  # PL/pgSQL's RAISE: all codes are the choice of who wrote it
        return not code.startswith(_CONFLICTS)
    if not code or code.startswith(_NOT_OF_ROWS) or code in _NOT_OF_ROWS_EITHER:
        return False
    return code != _FORBIDDEN or not function.startswith("aclcheck_error")


def reason(error: psycopg.Error, lock_s: int) -> str:
    """What the server has said, and where to look for the cause.

    Args:
        lock_s: how long statements wait for a lock, in seconds.
    """
    import psycopg

    text = "; ".join(filter(None, [error.diag.message_primary or str(error), error.diag.message_detail]))
    if isinstance(error, psycopg.errors.LockNotAvailable):
        text += f": another session has held a lock for {lock_s} s (see pg_locks and pg_stat_activity)"
    if isinstance(error, psycopg.errors.QueryCanceled):
        text += " (see statement_timeout of the user and the database)"
    return text


@contextmanager
def suppress_race() -> Iterator[None]:
    """``CREATE TABLE IF NOT EXISTS`` fails if another session creates the table at the same moment."""
    import psycopg

    with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
        yield
