"""The database of the demo ``postgres``: a server of its own that is killed, or one that is there already.

A thread looks at the table all the time, as any reader may: what it finds must be what the progress row says.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.testing.postgres import LocalPostgres

if TYPE_CHECKING:
    import psycopg

#: Where the service finds how to connect.
DSN_VARIABLE = "LEDGER_DSN"
_LOOK_S = 0.1
_DOWN_S = 1.5
_EXAMPLES_MAX = 5
_LOOK = """SELECT progress, (SELECT json_object_agg("partition", number) FROM (
    SELECT "partition", count(*) AS number FROM ledger GROUP BY "partition") AS numbers
) FROM onceflow_progress WHERE split_part(flow, '@', 1) = 'onceflow.' || %s"""


class Database(threading.Thread):
    """A schema for the run, and looks at its table; a context manager.

    Args:
        dsn: of a server that is there; None: one is started, and killed as often as ``kills`` says.
        flow: its name. topic: what it reads.
        batches: about as many will be committed; kills are spread over them.

    Attributes:
        say: called with what happens.
    """

    def __init__(
        self, dsn: str | None, folder: Path, flow: str, topic: str, *, batches: int, kills: int, rng: random.Random
    ) -> None:
        super().__init__(name="looks", daemon=True)
        _check_packages()
        self.server = None if dsn else LocalPostgres(folder / "postgres")
        self.schema = f"onceflow_demo_{flow.rpartition('-')[2]}"
        self.dsn = _with_schema(dsn or (self.server.dsn if self.server else ""), self.schema)
        self.flow, self.topic = flow, topic
        self.looks = self.torn = self.kills = 0
        self.problems: list[str] = []
        self.say: Callable[[str], None] = lambda text: None
        apart = batches / (kills + 1)
        # A moment later than the commit of a batch, so that they meet any step of the next ones.
        self._kill_at = [(int(apart * (n + 1)), rng.random() * 0.4) for n in range(kills)] if self.server else []
        self.planned = len(self._kill_at)
        self._leave = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None

    def connect(self) -> psycopg.Connection[Any]:
        """A new connection, whose ``search_path`` is the schema."""
        import psycopg

        return psycopg.connect(self.dsn, autocommit=True)

    def __enter__(self) -> Database:
        import psycopg

        if self.server is not None:
            self.server.start()
        try:
            with self.connect() as connection:
                connection.execute(f"CREATE SCHEMA {self.schema}")
        except psycopg.Error as error:
            raise OptionError(
                f"The database cannot be used: {str(error).splitlines()[0]}",
                next_step="check --dsn; its user needs CREATE on the database, for a schema of this run",
            ) from None
        os.environ[DSN_VARIABLE] = self.dsn
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        os.environ.pop(DSN_VARIABLE, None)
        if self.server is not None:
            self.server.stop()

    def finish(self) -> None:
        """End the looks."""
        self._leave.set()
        self.join(60.0)

    def clear(self) -> None:
        """Remove all that the run has made, from a server that stays."""
        if self.server is None:
            with self.connect() as connection:
                connection.execute(f"DROP SCHEMA {self.schema} CASCADE")

    # ---- looks ---------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._leave.wait(_LOOK_S):
                self._look_and_kill()
        except Exception as error:
            self._note(f"the reader that looked all the time: {type(error).__name__}: {error}")
        finally:
            self._close()

    def _look_and_kill(self) -> None:
        import psycopg

        try:
            batch = self._look()
        except psycopg.OperationalError as error:
            if self.server is None:
                raise
            self._note(f"the server does not answer: {error}")
            return
        if self._kill_at and batch >= self._kill_at[0][0]:
            _, after_s = self._kill_at.pop(0)
            time.sleep(after_s)
            self._kill()

    def _look(self) -> int:
        """One statement, so one state of the database. Returns the number of the batch that it shows."""
        import psycopg

        if self._connection is None:
            self._connection = self.connect()
        try:
            found = self._connection.execute(_LOOK, [self.flow]).fetchone()
        except psycopg.errors.UndefinedTable:  # the flow has not begun
            return 0
        if found is None or found[0] is None:
            return 0
        self.looks += 1
        progress = json.loads(found[0])
        offsets = {partition: offset for partition, offset in progress["offsets"][self.topic].items() if offset}
        if offsets != (found[1] or {}):
            self.torn += 1
            self._note(f"look {self.looks}: rows by partition {found[1]}, but the progress row has {offsets}")
        return int(progress["batch_id"])

    def _kill(self) -> None:
        if self.server is None:
            return
        self._close()
        self.server.kill()
        self.kills += 1
        self.say(f"server: SIGKILL to all processes of PostgreSQL ({self.kills} of {self.planned})")
        self._leave.wait(_DOWN_S)
        self.server.start()

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):  # its server may be gone
                self._connection.close()
            self._connection = None

    def _note(self, problem: str) -> None:
        if len(self.problems) < _EXAMPLES_MAX:
            self.problems.append(problem)


def _check_packages() -> None:
    try:
        import adbc_driver_postgresql  # noqa: F401
        import psycopg  # noqa: F401
    except ImportError as missing:
        raise EnvironmentUnusableError(
            f"The demo postgres needs packages that are not installed: {missing.name}",
            next_step="pip install ./workshop in a checkout",
        ) from missing


def _with_schema(dsn: str, schema: str) -> str:
    import psycopg
    from psycopg import conninfo

    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # its text has parts of the DSN, such as a password
        raise OptionError("--dsn is not understood", next_step="for example postgresql://ada@localhost/bank") from None
    options = f"{given.get('options') or ''} -csearch_path={schema}".strip()
    return conninfo.make_conninfo(dsn, options=options)
