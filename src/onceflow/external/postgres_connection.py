"""Connections to PostgreSQL: their settings, and what their errors mean."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from onceflow.errors import OptionError
from onceflow.external.sink import UnavailableError

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
#: the DSN, ``PGTZ`` and ``PGOPTIONS``. Rows must not depend on any of these, so all transactions have PostgreSQL's own
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
#: with other transactions, resources, operators, the system, and its configuration.
_NOT_OF_ROWS = ("08", "25", "40", "53", "57", "58", "F0")
#: Likewise: a lock was not available, a snapshot is too old, a foreign server cannot be reached, data or an index is
#: damaged. (XX000, an internal error, is not among them: extensions written in C, such as PostGIS, and plpy.error have
#: it for values that they do not take.)
_NOT_OF_ROWS_EITHER = ("55P03", "72000", "HV00N", "XX001", "XX002")
#: libpq does not give the code of a connection that is refused. In other languages of a server, the error says less.
_TOO_MANY = ("too many clients", "too many connections", "connection slots", "no more connections allowed")
_CONFLICTS = "40"  # a trigger that raises one of these asks for another attempt
_FORBIDDEN = "42501"  # a missing permission; row level security has the same code


_SMALLER = "or write smaller batches (max_records_per_batch)"
#: What errors mean that no row is to blame for, by SQLSTATE or its class: a meaning that the server's text lacks, what
#: to do, and whether it may be over soon. (PostgreSQL's manual, "PostgreSQL Error Codes".)
_TROUBLES: dict[str, tuple[str, str, bool]] = {
    "08": ("", "see that the server and what is in between (a pooler, a proxy) are well", True),
    "25006": (
        "it is a standby, or default_transaction_read_only is on",
        "name the primary in dsn=, or all servers with target_session_attrs=read-write",
        True,
    ),
    "25P03": (
        "idle_in_transaction_session_timeout",
        "see why the driver was halted, or could not reach the server, in the middle of a transaction",
        True,
    ),
    "25P04": (
        "transaction_timeout of the role, the database or the server",
        f"raise it, for example ALTER ROLE ... SET transaction_timeout = 0, {_SMALLER}",
        True,
    ),
    "40": ("", "see which other sessions write the same rows", True),
    "42P01": ("", "restore it, or name an existing one; see whether somebody has dropped or renamed it", False),
    "42703": ("", "a table of this name has other columns: see which application or version it belongs to", False),
    "3F000": ("", "restore the schema, or set another search_path", False),
    "0A000": ("", "use a PostgreSQL server of a supported version", False),
    "53100": ("", "make room on the server's disk", True),
    "53200": ("", f"give the server more memory, {_SMALLER}", True),
    "53300": ("", "close other connections, or raise max_connections, or the limit of the role or database", True),
    "53": ("", "give the server what it lacks", True),
    "55P03": (
        "another session holds a lock",
        "end the transaction that holds the lock, for example SELECT pg_terminate_backend(pid)",
        True,
    ),
    "55006": ("", "end the session that uses it", True),
    "57014": (
        "by statement_timeout of the role, the database or the server, or by somebody with pg_cancel_backend",
        f"raise the timeout, for example ALTER ROLE ... SET statement_timeout = 0, {_SMALLER}",
        True,
    ),
    "57P04": ("", "name a database in dsn= that exists", False),
    "57P05": ("idle_session_timeout", "raise it for the role", True),
    "57": ("", "see whether somebody restarts the server", True),
    "58": ("", "see the server's log: its system has failed", False),
    "72": ("", "see whether transactions of the server are kept open for very long", True),
    "HV00N": ("", "see that the foreign server is well", True),
    "F0": ("", "see the server's log: its configuration is damaged", False),
    "XX": ("", "see the server's log: the server has failed, or its data is damaged", False),
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
        connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)  # a pooler may change the session
    except psycopg.OperationalError as error:
        text = in_line(error)
        # A server that takes connections, but not this one, will not change its mind soon.
        if psycopg.pq.PGconn.ping(dsn.encode()) != Ping.OK:
            raise ConnectionError(text) from error
        trouble = _refused(dsn, text)
        if trouble is None:
            raise
        raise UnavailableError(trouble.what, trouble.next_step) from error
    # Whatever the role has: a statement must see what was altered since the transaction began.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def _refused(dsn: str, text: str) -> Trouble | None:
    """Why servers that take connections do not take this one, if it may pass."""
    import psycopg
    from psycopg import conninfo

    if code_of(None, text):
        return trouble_of(code_of(None, text), text)
    with suppress(psycopg.OperationalError):
        psycopg.connect(conninfo.make_conninfo(dsn, target_session_attrs="any")).close()
        return trouble_of("08" if _asked_for(dsn) == "any" else "25006", text)
    return None


def _asked_for(dsn: str) -> str:
    """Which servers will do: libpq's ``target_session_attrs``, from the DSN or the environment."""
    from psycopg import conninfo
    from psycopg.pq import Conninfo

    defaults = {each.keyword: each.val for each in Conninfo.get_defaults()}
    given = conninfo.conninfo_to_dict(dsn).get("target_session_attrs")
    return str(given or (defaults.get(b"target_session_attrs") or b"any").decode())


def answers(connection: psycopg.Connection[Any]) -> bool:
    """Whether a connection that was idle can be used.

    A role may have an ``idle_session_timeout``, and the driver's session is idle while tasks work. It cannot be set for
    the session: a pooler in transaction mode gives that to other clients. A server that ends a session sends why. So it
    is asked only if there is something to read.
    """
    import psycopg

    if connection.closed:
        return False
    if not wait([connection.fileno()], 0):
        return True
    with suppress(psycopg.OperationalError):
        connection.execute("SELECT")
        return True
    connection.close()
    return False


def pin(connection: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    """Set the settings that all transactions have, and others, for this transaction.

    Not for the session: a pooler may give the next transaction another one, and this one to other clients.
    """
    wanted = {**_PINNED, **settings}
    connection.execute(
        "SELECT set_config(name, value, true) FROM unnest(%s::text[], %s::text[]) AS pinned (name, value) "
        "WHERE current_setting(name, true) IS NOT NULL",  # unless the server is too old to have it
        [[*wanted], [*wanted.values()]],
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
    return code_may_be_of_a_row(code) and (code != _FORBIDDEN or not function.startswith("aclcheck_error"))


def code_may_be_of_a_row(code: str) -> bool:
    """Likewise, of its SQLSTATE. A missing permission has that of row level security."""
    return bool(code) and not code.startswith(_NOT_OF_ROWS) and code not in _NOT_OF_ROWS_EITHER


def kind_of(code: str) -> str:
    """The name of PostgreSQL's class of an error. Codes that are not PostgreSQL's have none."""
    import psycopg

    try:
        return psycopg.errors.lookup(code).__name__
    except KeyError:
        return f"SQLSTATE {code}"


@dataclass(frozen=True)
class Trouble:
    """Why the server has not done something that no row is to blame for.

    Args:
        what: as the server has said it, with what its code means. next_step: what the reader can do.
        passes: whether it may be over soon, also if nobody does anything.
    """

    what: str
    next_step: str
    passes: bool


def code_of(code: str | None, text: str) -> str:
    """The SQLSTATE of an error. Of a connection that was refused, there is only a text; "": it is not known."""
    return code or ("53300" if any(words in text for words in _TOO_MANY) else "")


def trouble_of(code: str | None, text: str) -> Trouble:
    """What an error means.

    Args:
        code: its SQLSTATE, if there is one. text: what the server has said.
    """
    code = code or ""
    for each in (code, code[:2]):
        if each in _TROUBLES:
            meaning, next_step, passes = _TROUBLES[each]
            return Trouble(f"{text} ({meaning})" if meaning else text, next_step, passes)
    return Trouble(text, "see what the server says, in its log, too, and start the flow again", False)


def said(error: psycopg.Error) -> str:
    """What the server has said, in one line."""
    return in_line("; ".join(filter(None, [error.diag.message_primary or str(error), error.diag.message_detail])))


def in_line(text: object) -> str:
    """A text, or that of an error, in one line."""
    return " ".join(str(text).split())


def holders(connection: psycopg.Connection[Any], tables: Sequence[tuple[str, str]]) -> str:
    """Other sessions that have locks on tables or their rows, in words; "": none is seen.

    Args:
        tables: their schemas and names.
    """
    import psycopg

    with suppress(psycopg.Error):
        found = connection.execute(
            "SELECT DISTINCT a.pid, a.usename, a.application_name, a.state, "
            "extract(epoch FROM clock_timestamp() - a.xact_start)::bigint FROM pg_locks AS l "
            "JOIN pg_stat_activity AS a USING (pid) JOIN pg_class AS c ON c.oid = l.relation "
            "JOIN pg_namespace AS n ON n.oid = relnamespace JOIN unnest(%s::text[], %s::text[]) AS t (schema, name) "
            "ON nspname = t.schema AND relname = t.name "
            "WHERE l.granted AND l.mode <> 'AccessShareLock' AND a.pid <> pg_backend_pid() ORDER BY 1 LIMIT 3",
            [[schema for schema, _ in tables], [name for _, name in tables]],
        ).fetchall()
        return "; ".join(
            f"pid {pid} of user {user} ({name or 'without application_name'}), {state}, in its transaction for {age} s"
            for pid, user, name, state, age in found
        )
    return ""


@contextmanager
def kept_alive(connection: psycopg.Connection[Any], every_s: float) -> Iterator[None]:
    """Let the server not take this session for an idle one while this process is busy inside a transaction.

    The limit ``idle_in_transaction_session_timeout`` is for drivers that were halted in the middle, or cut off: they
    must not hold a lock for ever. A halted process does not ask here, either.
    """
    import psycopg

    over = threading.Event()

    def ask() -> None:
        while not over.wait(every_s):
            with suppress(psycopg.Error):  # the transaction's own statements meet the same
                connection.execute("SELECT")

    asking = threading.Thread(target=ask, name="onceflow-postgres-alive", daemon=True)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


@contextmanager
def suppress_race() -> Iterator[None]:
    """``CREATE TABLE IF NOT EXISTS`` fails if another session creates the table at the same moment."""
    import psycopg

    with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
        yield
