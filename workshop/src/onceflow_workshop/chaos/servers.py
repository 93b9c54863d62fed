"""Query servers that share the ledger's table, and a thread that asks them all the time. All answers are kept."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from types import TracebackType
from typing import Any

from onceflow.errors import DeadlineExceededError
from onceflow.testing.waiting import WaitedInVainError
from onceflow_workshop.chaos.feeder import KEYS
from onceflow_workshop.chaos.flows import Names
from onceflow_workshop.testing.served import Answer, ServerProcess

_ASK_S = 0.02
_TIMEOUT_S = 15.0
_STARTS = 3
_SESSION = "6 seconds"  # brokers allow no less


class Servers:
    """Instances of ``onceflow table serve`` with two copies of each partition. As a context manager they end with it.

    Args:
        bootstrap_servers: where the instances find the brokers.
        count: how many instances.

    Attributes:
        answers: everything that was answered.
        strange: answers that no client should ever get.
    """

    def __init__(self, names: Names, bootstrap_servers: str, count: int) -> None:
        self._names = names
        given = [names.table, "--bootstrap-servers", bootstrap_servers, "--instances", f"{names.prefix}-servers"]
        given += ["--copies", "2", "--session-timeout", _SESSION, "--value", "text", "--no-access-log"]
        self._folders = [names.folder / f"server-{n}" for n in range(count)]
        self.all = [
            ServerProcess([*given, "--state-dir", str(folder)], names.folder / f"server-{n}.log")
            for n, folder in enumerate(self._folders)
        ]
        self.answers: list[Answer] = []
        self.strange: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="asker")

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        for server in self.all:
            server.end()

    def start(self) -> None:
        """Start all instances, and ask them from now on. The table must exist.

        Raises:
            WaitedInVainError: an instance has ended, or does not listen; the text is its log.
        """
        for server in self.all:
            server.launch()
        for server in self.all:
            server.wait()
        self._thread.start()

    def start_one(self, server: ServerProcess) -> None:
        """Start an instance, again if brokers do not answer yet, as a service manager would."""
        for _ in range(_STARTS - 1):
            with suppress(WaitedInVainError):
                server.start()
                return
        server.start()

    def delete_copies(self, server: ServerProcess) -> None:
        """Delete the local copies of an instance that does not run."""
        shutil.rmtree(self._folders[self.all.index(server)], ignore_errors=True)

    def finish(self, position: str, timeout_s: float) -> None:
        """Stop asking at random. Ask every instance for every key, for answers that contain everything.

        Raises:
            DeadlineExceededError: an instance did not get there.
        """
        self._stop()
        end = time.monotonic() + timeout_s
        for server in self.all:
            for number in range(KEYS) if self._thread.ident is not None else ():
                while not self._ask(server, _key(number), f"?wait=5s&min_position={position}"):
                    if time.monotonic() > end:
                        raise DeadlineExceededError(
                            f"A query server did not reach {position} within {timeout_s:g} s after the last fault",
                            detail="\n".join(server.log.read_text(errors="replace").splitlines()[-30:]),
                            next_step=f"see {server.log} (with --keep)",
                        )
                    time.sleep(0.2)

    def _stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        chance = random.Random(1)
        while not self._over.wait(_ASK_S):
            self._ask(chance.choice(self.all), _key(chance.randrange(KEYS)))

    def _ask(self, server: ServerProcess, key: str, query: str = "") -> bool:
        """Ask once, and keep the answer. Returns whether there was one."""
        asked_ms = int(time.time() * 1000)
        try:
            with urllib.request.urlopen(
                f"{server.url}/tables/{self._names.table}/keys/{key}{query}", timeout=_TIMEOUT_S
            ) as response:
                found = response.read()
        except urllib.error.HTTPError as refused:
            found = refused.read()
            if refused.code != 404:
                if refused.code != 503:
                    self.strange.append(f"{refused.code}: {found[:500]!r}")
                return False
        except (OSError, HTTPException):  # it was killed, or is stopped
            return False
        self._keep(key, json.loads(found), asked_ms)
        return True

    def _keep(self, key: str, document: Any, asked_ms: int) -> None:
        value = document.get("value")
        raw = None if value is None else value.encode()
        self.answers.append(Answer(key.encode(), raw, document["position"], document["lag"]["ms"], asked_ms))


def _key(number: int) -> str:
    return f"key-{number:03d}"
