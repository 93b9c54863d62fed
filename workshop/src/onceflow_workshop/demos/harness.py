"""Runs services as processes, kills their drivers at named steps, and starts them again.

A kill is planned, not timed: the process gets a fault (``ONCEFLOW_FAULTS``) that sends it SIGKILL right after a step
of a batch. A marker file distinguishes a planned death from any other, which ends the demo: a service that stops
by itself is a finding, not something to hide behind a restart.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from onceflow.client.deadline import Deadline
from onceflow.errors import DeadlineExceededError, OnceflowError
from onceflow.hooks import STEPS, VARIABLE
from onceflow.testing.faults import fault

# In place of a step, of a kill that was not planned for one.
NOW = "now"
# A service that is just starting stops when it has started.
STOP_S = 60.0
TIDY_UP_S = 5.0
_POLL_S = 0.1
_LOG_TAIL_LINES = 15
_DELETE_ATTEMPTS = 50
# Spark makes Unix sockets in java.io.tmpdir; with 45 characters more, their paths must stay below about 100.
_SOCKET_FOLDER_LENGTH_MAX = 55


class ServiceFailedError(OnceflowError):
    """A service of a demo stopped by itself."""


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL: right after ``step``, in a batch at least ``batches`` after the last committed one.

    Args:
        loses_state: whether the service's local state is deleted before the next start.
        in_batch: the number of the batch itself, in place of ``batches``: the same point in every run.
    """

    step: str
    batches: int = 0
    loses_state: bool = False
    in_batch: int | None = None


@dataclass
class Death:
    """A kill that happened; ``back_s`` is how long it took until the next batch was committed.

    Args:
        batch: the last one that the service had reported as committed. in_batch: see ``Kill``.
    """

    step: str
    batch: int
    at: float
    back_s: float | None = None
    lost_state: bool = False
    reported: bool = False
    in_batch: int | None = None


def plan_kills(count: int, *, batches: int, rng: random.Random, steps: Sequence[str] = STEPS) -> list[Kill]:
    """Kills at different steps, spread over a run of at least this many batches so that all of them happen."""
    chosen = rng.sample(steps, count) if count <= len(steps) else rng.choices(steps, k=count)
    # A kill at `settle` needs one batch more: that step belongs to the next one.
    apart = max(1, batches // (count + 1) - 1)
    return [Kill(step, rng.randint(1, apart)) for step in chosen]


def plan_losses(kills: Sequence[Kill], *, rng: random.Random) -> list[Kill]:
    """The same number of kills for a service with local state, at least one of which also costs it that state.

    The first comes when something has been committed, so that there is something to lose at the first loss; at a
    later one there may be nothing, when the driver died before it had opened its state again. After the last loss
    no kill comes before the flow has committed a batch, and so has reported that it read its state back.
    """
    if not kills:
        return []
    planned = list(kills)
    if planned[0].step == "init":
        later = next((n for n, kill in enumerate(planned) if kill.step != "init"), None)
        if later is None:
            planned[0] = replace(planned[0], step=rng.choice(STEPS[1:]))
        else:
            planned[0], planned[later] = planned[later], planned[0]
    planned[0] = replace(planned[0], batches=max(2, planned[0].batches))
    lost = {n for n in range(len(planned)) if rng.random() < 0.5} or {rng.randrange(len(planned))}
    # What a service has reported may be one batch behind, so the next but two is surely not the first.
    return [
        replace(kill, loses_state=n in lost, batches=max(3, kill.batches) if n > max(lost) else kill.batches)
        for n, kill in enumerate(planned)
    ]


class Service:
    """One flow in a process of its own, over all its deaths.

    The process prints one JSON line per committed batch, as ``onceflow.serve`` does, with ``batch``, ``records`` and,
    if it likes, the ``seconds`` that it took and more; all else goes to its log. ``records`` and ``seconds`` are the
    sums of what it reported, ``reports`` are the lines.

    Args:
        flow: the flow's name in Kafka.
        command: argument list of the process.
        kills: in this order; each restart gets the next one.
        folder: for its log and the markers of faults.
        state: its local state, which some kills cost it.
    """

    def __init__(
        self, flow: str, command: Sequence[str], kills: Sequence[Kill], folder: Path, *, state: Path | None = None
    ) -> None:
        self.flow = flow
        self.deaths: list[Death] = []
        self.batch = 0
        self.records = 0
        self.seconds = 0.0
        self.reports: list[dict[str, Any]] = []
        self.planned = len(kills)
        self.planned_losses = sum(kill.loses_state for kill in kills)
        self.log_file = folder / f"{flow}.log"
        self._command = list(command)
        self._kills = list(kills)
        self._folder = folder
        self._state = state
        self._child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._marker = folder / "none"
        self._kill = Kill("none")

    def start(self) -> None:
        """Start the process, with the next fault if there is one left."""
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # What a killed process leaves in temporary folders goes when the demo's own folder does.
        environment |= {"TMPDIR": str(self._folder), "SPARK_LOCAL_DIRS": str(self._folder)}
        if len(str(self._folder)) <= _SOCKET_FOLDER_LENGTH_MAX:
            options = [environment.get("JAVA_TOOL_OPTIONS", ""), f"-Djava.io.tmpdir={self._folder}"]
            environment["JAVA_TOOL_OPTIONS"] = " ".join(options).strip()
        if self._kills:
            kill = self._kills[0]
            self._marker = self._folder / f"{self.flow}.kill-{len(self.deaths) + 1}"
            batch = self.batch + kill.batches if kill.in_batch is None else kill.in_batch
            where = {} if kill.step == "init" else {"batch_from": batch}
            environment[VARIABLE] = fault(kill.step, "kill", flow=self.flow, once_file=str(self._marker), **where)
        with self.log_file.open("a") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                env=environment,
                cwd=self._folder,
                # Its own group: Ctrl-C is for the demo, which stops its services in order; and what a dead driver
                # leaves behind (its JVM) can be ended with it.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True)
        self._reader.start()

    def kill(self, *, loses_state: bool = False) -> None:
        """SIGKILL at this moment, in place of a planned one; `check` starts the process again."""
        self._kills.insert(0, Kill(NOW, loses_state=loses_state))
        self._marker.touch()
        if self._child is not None:
            self._child.kill()

    def check(self) -> None:
        """Start again what a planned kill has ended, without its local state if that is planned.

        Raises:
            ServiceFailedError: it ended in another way.
        """
        if self._child is None or self._child.poll() is None:
            return
        code = self._child.returncode
        self.destroy()
        if not self._died_as_planned(code):
            raise self._failed(f"stopped by itself, with exit code {code}")
        if self._kill.loses_state and self._state is not None:
            self.deaths[-1].lost_state = _delete(self._state)
        self.start()

    def terminate(self) -> None:
        """Ask the process to stop (SIGTERM)."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def wait(self, timeout_s: float) -> None:
        """Return when it has stopped after ``terminate``.

        Raises:
            ServiceFailedError: it did not within this time, or with an error.
        """
        if self._child is None:
            return
        try:
            code = self._child.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise self._failed("did not stop after SIGTERM") from None
        self.destroy()
        # A process that was just starting had no handler for SIGTERM yet.
        if code not in (0, -signal.SIGTERM) and not self._died_as_planned(code):
            raise self._failed(f"stopped after SIGTERM with exit code {code}")

    def destroy(self) -> None:
        """SIGKILL for the driver and whatever it started, if any of it still runs."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # all gone (macOS says it the other way)
            pass
        child.wait()
        if self._reader is not None:
            self._reader.join(2.0)  # what it said before it died counts

    def log_lines(self, pattern: str) -> list[re.Match[str]]:
        """Lines of its log, over all its lives, in which the pattern is found."""
        try:
            with self.log_file.open(errors="replace") as lines:
                return [found for found in map(re.compile(pattern).search, lines) if found is not None]
        except OSError:
            return []

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        except OSError:
            return ""

    def _died_as_planned(self, code: int) -> bool:
        if code != -signal.SIGKILL or not self._kills or not self._marker.exists():
            return False
        self._kill = self._kills.pop(0)
        self.deaths.append(Death(self._kill.step, self.batch, time.monotonic(), in_batch=self._kill.in_batch))
        return True

    def _failed(self, how: str) -> ServiceFailedError:
        return ServiceFailedError(
            f"The service {how}", flow=self.flow, detail=self.log_tail(), next_step=f"see its log: {self.log_file}"
        )

    def _read(self, lines: IO[str] | None) -> None:
        if lines is None:
            return
        with lines:
            for line in lines:
                try:
                    report = json.loads(line)
                    batch, records, seconds = (
                        int(report["batch"]),
                        int(report["records"]),
                        float(report.get("seconds", 0)),
                    )
                except (ValueError, KeyError, TypeError, AttributeError):
                    with self.log_file.open("a") as log:
                        log.write(line)
                    continue
                self.reports.append(report)
                self.batch = max(self.batch, batch)
                self.records += records
                self.seconds += seconds
                for death in self.deaths:
                    if death.back_s is None:
                        death.back_s = time.monotonic() - death.at


def _delete(folder: Path) -> bool:
    """Delete a folder with all that is in it; whether there was anything.

    Python workers of a dead driver end when they find out, a moment later; one may still be writing.
    """
    existed = folder.is_dir() and any(folder.iterdir())
    for attempt in range(_DELETE_ATTEMPTS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                break
        except OSError:
            if attempt == _DELETE_ATTEMPTS - 1:
                raise
        else:
            break
        time.sleep(_POLL_S)
    return existed


class Supervisor:
    """Keeps services running; a context manager that leaves no process behind."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services = list(services)

    def __enter__(self) -> Supervisor:
        try:
            for service in self.services:
                service.start()
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:  # interrupted or failed: let them tidy up, but not for long
                for service in self.services:
                    service.terminate()
                end = time.monotonic() + TIDY_UP_S
                for service in self.services:
                    with contextlib.suppress(ServiceFailedError):
                        service.wait(end - time.monotonic())
        finally:
            self._destroy()

    def add(self, service: Service) -> None:
        """One more service, which is started now."""
        self.services.append(service)
        service.start()

    @property
    def kills(self) -> int:
        return sum(len(service.deaths) for service in self.services)

    def run(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Restart what is killed until ``done()``, which is asked about ten times a second.

        Raises:
            ServiceFailedError: a service stopped by itself.
            DeadlineExceededError: it took too long; the detail has the ends of the logs.
        """
        while True:
            for service in self.services:
                service.check()
            if done():
                return
            if deadline.expired:
                raise DeadlineExceededError(
                    f"The services were not done within {deadline.seconds:g} s",
                    detail="\n".join(f"{s.flow}, batch {s.batch}:\n{s.log_tail()}" for s in self.services),
                    next_step="on a slow machine allow more time or fewer records; else see the logs",
                )
            time.sleep(_POLL_S)

    def stop(self, some: Iterable[Service] | None = None) -> None:
        """End services in order (SIGTERM). They are not started again.

        Args:
            some: which of the services; None: all.

        Raises:
            ServiceFailedError: one did not stop in time, or with an error.
        """
        ending = list(self.services if some is None else some)
        for service in ending:
            service.terminate()
        end = time.monotonic() + STOP_S
        for service in ending:
            service.wait(end - time.monotonic())

    def _destroy(self) -> None:
        for service in self.services:
            service.destroy()
