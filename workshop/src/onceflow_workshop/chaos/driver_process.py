"""Driver processes of a run: they are started, watched, killed and started again.

Normally one driver runs at a time. ``intrude`` starts a second one, as if by mistake: it fences the first, which must
notice that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from onceflow.errors import DeadlineExceededError
from onceflow.hooks import VARIABLE
from onceflow.planning.engine import DRIVER, ENGINES, TASKS
from onceflow.testing.processes import descendants
from onceflow_workshop.chaos.flows import Choices, Names

STOP_S = 90.0
_SPARK = {
    "spark.driver.memory": "1g",
    # A driver that runs for seconds only needs fast compilation more than fast code.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.sql.shuffle.partitions": "4",
}


@dataclass
class Stop:
    """A driver that ended by itself: with one of onceflow's errors, or not."""

    error: str
    text: str
    ours: bool


@dataclass
class Engines:
    """What ran the flows.

    Args:
        starts: how often a flow has started with each value of ``engine=``.
        batches: how many batches the driver has committed, and how many tasks have read and written.
        switches: how often a batch of a flow was written by another one of them than the one before it.
        last: which of them has written the last batch of each flow.
    """

    starts: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    last: dict[str, str] = field(default_factory=dict)

    def committed(self, flow: str, *, by_tasks: bool) -> None:
        """A batch of a flow was committed.

        Args:
            by_tasks: whether tasks have written it, not the driver.
        """
        place = TASKS if by_tasks else DRIVER
        self.batches[place] += 1
        self.switches += self.last.get(flow, place) != place
        self.last[flow] = place

    def add(self, other: Engines) -> None:
        """Count what another driver has done, too."""
        self.starts += other.starts
        self.batches += other.batches
        self.switches += other.switches

    def as_json(self) -> dict[str, Any]:
        return {"starts": dict(self.starts), "batches": dict(self.batches), "switches": self.switches}


@dataclass
class Commits:
    """What drivers have committed: the last batch of each flow, when it was reported, and by which engines."""

    batches: dict[str, int] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)
    count: int = 0
    engines: Engines = field(default_factory=Engines)


class DriverProcess:
    """One process of ``onceflow_workshop.chaos.driver``.

    Attributes:
        program: what it runs. A test puts a broken build here, to see that a run finds it out.
    """

    program = ("-m", "onceflow_workshop.chaos.driver")

    def __init__(self, arguments: Mapping[str, Any], folder: Path, rule: str | None, commits: Commits) -> None:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment |= {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder / "spark-local")}
        environment["ONCEFLOW_STATE_DIR"] = str(folder / "state")  # where flows do not name one
        if rule is not None:
            environment[VARIABLE] = rule
        self.log_file = folder / "drivers.log"
        self.stop: Stop | None = None
        self._commits = commits
        with self.log_file.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, *self.program, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.poll()

    def send(self, signal_number: int, *, whole: bool = False) -> None:
        """Send a signal to the Python process, or, with ``whole``, also to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if whole:
                os.killpg(self.pid, signal_number)
            else:
                os.kill(self.pid, signal_number)

    def below(self, *words: str) -> list[int]:
        """Pids of the processes that it has started and whose command line contains one of the words."""
        return [pid for pid, line in descendants(self.pid).items() if any(word in line for word in words)]

    def destroy(self) -> None:
        """Send SIGKILL to all of its processes that are left."""
        self.send(signal.SIGKILL, whole=True)
        self._child.wait()
        self._reader.join(2.0)

    def _read(self, lines: IO[str] | None) -> None:
        if lines is None:
            return
        with lines:
            for line in lines:
                try:
                    report = json.loads(line)
                except ValueError:
                    continue
                if "error" in report:
                    self.stop = Stop(report["error"], report["text"], report.get("ours", True))
                elif "engine" in report:
                    self._commits.engines.starts[report["engine"]] += 1
                elif "batch" in report:
                    self._committed(report["flow"], report["batch"], by_tasks=report["by_tasks"])

    def _committed(self, flow: str, batch: int, *, by_tasks: bool) -> None:
        self._commits.batches[flow] = batch
        self._commits.at[flow] = time.monotonic()
        self._commits.count += 1
        self._commits.engines.committed(flow, by_tasks=by_tasks)


class Driver:
    """Keeps one driver of the flows running.

    Args:
        kinds: of flows. master: Spark's.
        engines: each start of a flow has one of these. rng: chooses it.
    """

    def __init__(
        self,
        names: Names,
        kinds: Sequence[str],
        bootstrap_servers: str,
        master: str,
        spark: Mapping[str, str],
        *,
        engines: Sequence[str] = ENGINES,
        rng: random.Random,
    ) -> None:
        self.names = names
        self.kinds = list(kinds)
        self.commits = Commits()
        self.stops: Counter[str] = Counter()
        self.strange: list[Stop] = []
        self.starts = 0
        self.kills = 0  # SIGKILLs to the Python process of a driver
        self._engines = engines
        self._rng = rng
        self._bootstrap_servers = bootstrap_servers
        self._master = master
        self._spark = {**_SPARK, **spark}
        # Fenced drivers, and what is left of killed ones; ``close`` ends them.
        self._leftovers: list[DriverProcess] = []
        self.process: DriverProcess | None = None
        self.choices = Choices()

    @property
    def running(self) -> DriverProcess:
        if self.process is None:
            raise RuntimeError("the driver was not started")
        return self.process

    def start(self, rule: str | None = None) -> None:
        """Start a new process. ``rule``: a fault for it, see ``onceflow.testing.faults``."""
        self.process = self._new(rule)

    def stand_by(self) -> DriverProcess:
        """Start a second driver that waits beside the first one. `takes_over` makes it the right one."""
        return self._new(None)

    def takes_over(self, standby: DriverProcess) -> None:
        """From now on this driver is the right one, and the one before it is to end."""
        self._leftovers.append(self.running)
        self.process = standby

    def intrude(self) -> None:
        """Start a second driver beside the first. From then on the second one is the right one."""
        self._leftovers.append(self.running)
        self.start()

    def kill(self, *, jvm_only: bool = False, leave_rest: bool = False) -> None:
        """Kill the driver with SIGKILL, and also its other processes, unless ``leave_rest`` is true."""
        process = self.running
        if jvm_only:
            for pid in process.below("org.apache.spark.deploy.SparkSubmit"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        self.kills += 1
        process.send(signal.SIGKILL)
        if leave_rest:
            self._leftovers.append(process)
            process._child.wait()
            self.process = None
        else:
            process.destroy()

    def revive(self) -> bool:
        """Start the driver again if it has ended, as a service manager would. Returns whether it had ended."""
        process = self.process
        if process is not None and process.exit_code is None:
            return False
        if process is not None:
            self.kills += process.exit_code == -signal.SIGKILL
            process.destroy()
            self._note(process)
        self.start()
        return True

    def await_commits(self, since: float, *, timeout_s: float) -> float:
        """Return how long after ``since`` every flow had committed. Restarts the driver if it ends while waiting.

        Raises:
            DeadlineExceededError: a flow did not commit; the detail has the end of the log.
        """
        begun = dict(self.commits.batches)
        end = time.monotonic() + timeout_s
        flows = [self.names.flow(kind) for kind in self.kinds]
        while not all(self.commits.at.get(flow, 0.0) > since for flow in flows):
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"A flow did not commit within {timeout_s:g} s after a fault",
                    flow=", ".join(flow for flow in flows if self.commits.at.get(flow, 0.0) <= since),
                    detail=f"last batches {begun}; stops {dict(self.stops)}\n{self.log_tail()}",
                    next_step=f"see {self.names.folder / 'drivers.log'}",
                )
            self.revive()
            time.sleep(0.05)
        return max(self.commits.at[flow] for flow in flows) - since

    def end(self) -> None:
        """Stop the driver cleanly.

        Raises:
            DeadlineExceededError: it did not stop, and was killed.
        """
        process = self.running
        process.send(signal.SIGTERM)
        try:
            process._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceededError(
                f"The driver did not stop within {STOP_S:g} s after SIGTERM",
                detail=self.log_tail(),
                next_step=f"see {process.log_file}",
            ) from None
        finally:
            process.destroy()
            self._note(process)

    def close(self) -> None:
        """End every process that was started here."""
        for process in [*self._leftovers, *([] if self.process is None else [self.process])]:
            process.send(signal.SIGCONT, whole=True)
            process.destroy()
            if process is not self.process:
                self._note(process)
        self._leftovers = []

    def log_tail(self, lines: int = 30) -> str:
        try:
            return "\n".join((self.names.folder / "drivers.log").read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _note(self, process: DriverProcess) -> None:
        stop = process.stop
        if stop is None:
            return
        self.stops[stop.error] += 1
        if not stop.ours:
            self.strange.append(stop)
        process.stop = None

    def _new(self, rule: str | None) -> DriverProcess:
        self.starts += 1
        engines = {kind: self._rng.choice(self._engines) for kind in self.kinds}
        arguments = {
            "prefix": self.names.prefix,
            "folder": str(self.names.folder),
            "dsn": self.names.dsn,
            "versions": self.names.versions,
            "copied": self.names.copied,
            "bootstrap": self._bootstrap_servers,
            "master": self._master,
            "spark": self._spark,
            "flows": self.kinds,
            "choices": asdict(replace(self.choices, engines=engines)),
        }
        return DriverProcess(arguments, self.names.folder, rule, self.commits)
