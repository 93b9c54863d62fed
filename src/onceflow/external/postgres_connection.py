"""Connections to PostgreSQL: their settings, and what their errors mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


def connect(dsn: str) -> psycopg.Connection[Any]:
    """A new connection.

    Raises:
        ConnectionError: the server cannot be reached, or takes no connections at the moment.
        psycopg.OperationalError: it refuses this one.
    """
    import psycopg
    from psycopg.pq import Ping

    try:
        return psycopg.connect(dsn, autocommit=True)
    except psycopg.OperationalError as error:
        # A server that takes connections, but not this one, will not change its mind soon.
        if psycopg.pq.PGconn.ping(dsn.encode()) == Ping.OK:
            raise
        raise ConnectionError(" ".join(str(error).split())) from error


def completed(dsn: str) -> str:
    """The same with the settings of connections that it does not have."""
    import psycopg
    from psycopg import conninfo

    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # its text has parts of the DSN, such as a password
        raise OptionError(
            "dsn= is not understood",
            next_step="it is postgresql://user:password@host/database, or host=... dbname=... user=...",
        ) from None
    return conninfo.make_conninfo("", **{**_SETTINGS, **given})


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


def reason(error: psycopg.Error, lock_s: int) -> str:
    """What the server has said, and where to look for the cause.

    Args:
        lock_s: how long statements wait for a lock, in seconds.
    """
    import psycopg

    text = "; ".join(filter(None, [error.diag.message_primary or str(error), error.diag.message_detail]))
    if isinstance(error, psycopg.errors.LockNotAvailable):
        text += f": another session has held a lock for {lock_s} s (see pg_locks and pg_stat_activity)"
    return text


@contextmanager
def suppress_race() -> Iterator[None]:
    """``CREATE TABLE IF NOT EXISTS`` fails if another session creates the table at the same moment."""
    import psycopg

    with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
        yield
