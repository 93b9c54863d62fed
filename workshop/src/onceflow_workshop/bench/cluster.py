"""A flow with state on a standalone cluster, while executors and hosts come and go: ``onceflow bench cluster``.

Broker, master, workers, the driver and the load are processes of this machine, and share its cores. Each worker has
one core and is a host of its own (`cluster_hosts.Hosts`). In the end the independent consumer of the load says whether
every record was counted exactly once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError
from onceflow_workshop.bench import cluster_figures as figures
from onceflow_workshop.bench.cluster_hosts import Hosts
from onceflow_workshop.bench.cluster_load import Load, Plan, Seen
from onceflow_workshop.bench.cluster_service import Argument, Batch
from onceflow_workshop.bench.processes import Usage
from onceflow_workshop.bench.service_process import ended, process

STEADY, EXECUTOR, HOST, GROWTH, SHRINK, BACKLOG = PHASES = (
    "steady",
    "executor",
    "host",
    "growth",
    "shrink",
    "backlog",
)
# The last ones are of executors.
_KEPT = ("*.jsonl", "*.log", "*/log", "cluster/*.log", "cluster/*/app-*/*/std*")
_START_S = 180.0
_VISIBLE_S = 180.0
_SLOWEST_PER_S = 1000  # records of a backlog
_LOOK_S = 0.5
_POLL_S = 0.1
_JOIN_S = 60.0  # how long a new executor may take until it has worked
_DOUBLES_S = 1.0  # after the last record, a second one of some record may still come
# For the progress bar only.
_START_SECONDS, _BACKLOG_PER_S = 30.0, 40_000

#: Shows what is going on: a text, and how many seconds of how many are over.
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        workers: of one core each. partitions: of source, table and output.
        accounts: keys of the table; all are put in before anything is measured.
        rate: records per second, but in the backlog. seconds: of each phase but the backlog.
        warm_seconds: of load before the first phase. copies: of the table, see ``Flow.process``.
        phases: of PHASES. backlog: records. local: whether a local master works off the same backlog, too.
        keep: a folder for the logs of all processes, and what the service tells of each batch; None: they are deleted.
    """

    workers: int = 4
    partitions: int = 16
    accounts: int = 100_000
    rate: int = 2000
    seconds: float = 30.0
    warm_seconds: float = 20.0
    trigger_ms: int = 200
    copies: int = 1
    phases: Sequence[str] = PHASES
    backlog: int = 2_000_000
    local: bool = False
    keep: Path | None = None

    def steps(self) -> dict[str, float]:
        """What comes one after the other, and about how many seconds it takes."""
        backlog_s = _START_SECONDS + self.backlog / _BACKLOG_PER_S
        under_load = {phase: self.seconds for phase in self.phases if phase != BACKLOG}
        backlogs = {"backlog": backlog_s, "backlog, local": backlog_s} if self.local else {"backlog": backlog_s}
        return {
            "starting": _START_SECONDS,
            **({"warming up": self.warm_seconds, **under_load} if under_load else {}),
            **(backlogs if BACKLOG in self.phases else {}),
            "checking": 1.0,
        }


def run(choices: Choices, show: Show) -> Iterator[dict[str, Any]]:
    """Measure one phase after the other; yields a result (a JSON object) for each, and a summary.

    Raises:
        EnvironmentUnusableError: the service or the load has ended; with its last words.
        DeadlineExceededError: something did not happen in time.
    """
    from onceflow.broker.local import LocalBroker
    from onceflow.testing.broker import create_topic

    clock = _Clock(choices.steps(), show)
    clock.begin("starting")
    with (
        tempfile.TemporaryDirectory(prefix="onceflow-", ignore_cleanup_errors=True) as folder,
        _keeping(Path(folder), choices.keep),
        LocalBroker(Path(folder) / "broker") as broker,
    ):
        flow = f"bench-cluster-{uuid.uuid4().hex[:6]}"
        servers = broker.bootstrap_servers
        for topic in (f"{flow}-in", f"{flow}-out"):
            create_topic(servers, topic, choices.partitions)
        plan = Plan(servers, f"{flow}-in", f"{flow}-out", choices.accounts)
        with (
            Hosts(Path(folder) / "cluster", choices.workers) as hosts,
            Load(plan, Path(folder) / "load.log") as load,
        ):
            yield from _Run(choices, flow, plan, hosts, load, Path(folder), clock).run()


@contextmanager
def _keeping(folder: Path, keep: Path | None) -> Iterator[None]:
    """In the end, what processes have said in this folder is copied to another one."""
    try:
        yield
    finally:
        if keep is not None:
            for file in (each for pattern in _KEPT for each in folder.glob(pattern)):
                to = keep / file.relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)


class _Clock:
    """Turns what is going on into seconds that are over, for the progress bar."""

    def __init__(self, steps: dict[str, float], show: Show) -> None:
        self._steps, self._show = steps, show
        self._step, self._since = "", time.monotonic()

    def begin(self, step: str) -> None:
        self._step, self._since = step, time.monotonic()
        self.tick()

    def tick(self, more: str = "") -> None:
        """It is still going on."""
        names = list(self._steps)
        before = sum(list(self._steps.values())[: names.index(self._step)])
        within = min(time.monotonic() - self._since, self._steps[self._step])
        text = f"{self._step}: {more}" if more else self._step
        self._show(text, round(before + within), round(sum(self._steps.values())))


class _Batches:
    """The batches that the service has told of so far."""

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, 0
        self.all: list[Batch] = []

    def look(self) -> list[Batch]:
        if self._log.exists():
            with self._log.open("rb") as handle:
                handle.seek(self._read)
                lines = handle.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read += len(whole)
            self.all += [Batch.of_line(line) for line in whole.decode().splitlines()]
        return self.all

    def between(self, since: float, until: float) -> tuple[list[Batch], list[Batch]]:
        """Those that were committed in this time, and all before it."""
        known = self.look()
        return [each for each in known if since <= each.at < until], [each for each in known if each.at < since]


class _Run:
    def __init__(
        self, choices: Choices, flow: str, plan: Plan, hosts: Hosts, load: Load, folder: Path, clock: _Clock
    ) -> None:
        self._choices, self._flow, self._plan, self._hosts, self._load = choices, flow, plan, hosts, load
        self._folder, self._clock = folder, clock
        self._batches = _Batches(folder / "batches.jsonl")
        self._ended: Callable[[], str] = lambda: ""
        self._executors, self._driver = Usage(hosts.executor_pids), Usage([])
        self._looked = 0.0
        self._rows: list[dict[str, Any]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        choices = self._choices
        self._load.fill(choices.accounts)
        with self._service(self._hosts.master, "driver"):
            self._until_visible("every account has had its first record", _START_S)
            under_load = [phase for phase in choices.phases if phase != BACKLOG]
            if under_load:
                self._load.rate(choices.rate)
                self._clock.begin("warming up")
                self._pause(choices.warm_seconds)
            for phase in under_load:
                yield self._kept(self._phase(phase))
            self._load.rate(0)
            self._until_visible("every record has come out")
        if BACKLOG in choices.phases:
            while len(self._hosts.workers) < choices.workers:
                self._hosts.add_worker()
            yield self._kept(self._backlog("cluster"))
            if choices.local:
                yield self._kept(self._backlog("local"))
        self._clock.begin("checking")
        yield figures.summary(self._rows, self._checked())

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        self._rows.append(row)
        return row

    def _checked(self) -> str:
        time.sleep(_DOUBLES_S)
        seen = self._load.look()
        problems = [seen.problem, *(row["correct"] for row in self._rows if row["correct"] != "yes")]
        return "; ".join(filter(None, problems))

    # ---- phases --------------------------------------------------------------------------------------

    def _phase(self, phase: str) -> dict[str, Any]:
        self._clock.begin(phase)
        if phase in (HOST, SHRINK) and len(self._hosts.workers) < 2:
            self._hosts.add_worker()
        self._until(self._hosts.all_work, _JOIN_S)  # what the phase before has done is over
        self._restart_meters()
        self._load.open_window()
        since = time.monotonic()
        self._pause(min(5.0, self._choices.seconds / 4))
        what = self._happens(phase)
        self._pause(since + self._choices.seconds - time.monotonic())
        self._load.close_window()
        self._wait(
            lambda: (seen := self._load.look()).window_visible == seen.window_sent,
            _VISIBLE_S,
            f"all records of the phase {phase} have come out",
        )
        cpu_s = self._cpu_s()
        batches, earlier = self._batches.between(since, time.monotonic())
        seen = self._load.look(percentiles=True)
        found = figures.of_batches(batches, earlier)
        return {
            "bench": "cluster",
            "phase": phase,
            "what": what,
            "workers": len(self._hosts.workers),
            **found,
            "mib_per_host": list(self._hosts.state_mib().values()),
            **figures.of_cpu(cpu_s, found["records"]),
            "p50_ms": seen.p50_ms,
            "p99_ms": seen.p99_ms,
            "outage_s": seen.outage_s,
            "correct": _wrong(seen) or "yes",
        }

    def _happens(self, phase: str) -> str | None:
        """What makes the phase. Returns it in words; None: nothing happens."""
        hosts = self._hosts
        oldest = hosts.workers[0]
        self._look()
        if phase == EXECUTOR:
            hosts.kill_executor(oldest)
            return f"the executor of {oldest} was killed"
        if phase == HOST:
            hosts.kill_host(oldest)
            return f"{oldest} was killed, its home deleted"
        if phase == GROWTH:
            since, name = time.monotonic(), hosts.add_worker()
            works = self._until(lambda: self._has_worked(name), _JOIN_S)
            return f"{name} was added; it worked after {time.monotonic() - since:.0f} s" if works else f"{name} is idle"
        if phase == SHRINK:
            hosts.leave(oldest, self._look)
            return f"{oldest} has left"
        return None

    def _has_worked(self, worker: str) -> bool:
        """Whether it has processed a partition in a committed batch."""
        place = f":{self._hosts.state_dir(worker)}"
        return any(home.endswith(place) for batch in self._batches.look() for home in batch.homes.values())

    def _backlog(self, runs_on: str) -> dict[str, Any]:
        choices, hosts = self._choices, self._hosts
        local = runs_on == "local"
        self._clock.begin("backlog, local" if local else "backlog")
        self._load.consume(wanted=False)  # it would take the CPU of who is measured
        self._load.fill(choices.backlog)
        since, known = time.monotonic(), len(self._batches.look())
        master = f"local[{choices.workers}]" if local else hosts.master
        with self._service(master, f"backlog-{runs_on}"):

            def new() -> list[Batch]:
                return self._batches.look()[known:]

            self._wait(new, _START_S, "the first batch of the backlog")
            self._restart_meters()
            counted = sum(batch.records for batch in new())
            self._wait(
                lambda: sum(batch.records for batch in new()) >= choices.backlog,
                _START_S + choices.backlog / _SLOWEST_PER_S,
                "the backlog is worked off",
            )
            cpu_s = self._cpu_s()
            batches = new()
            self._load.consume(wanted=True)
            self._until_visible("every record of the backlog has come out", choices.backlog / _SLOWEST_PER_S)
        found = figures.of_batches(batches, self._batches.all[:known])
        if local:
            cpu_s["executors"] = 0.0  # they are the driver
        return {
            "bench": "cluster_backlog",
            "runs_on": runs_on,
            "workers": choices.workers,
            **found,
            "seconds": round(batches[-1].at - since, 1),
            "records_per_s": figures.rate_after_first(batches),
            "mib_per_host": None if local else list(hosts.state_mib().values()),
            **figures.of_cpu(cpu_s, found["records"] - counted),
            "correct": _wrong(self._load.look()) or "yes",
        }

    # ---- inside --------------------------------------------------------------------------------------

    @contextmanager
    def _service(self, master: str, name: str) -> Iterator[None]:
        """The service runs on this master while this is open."""
        folder = self._folder / name
        (folder / "tmp").mkdir(parents=True)
        config = {
            **({} if master.startswith("local") else self._hosts.settings),
            "spark.driver.memory": "1g",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        plan, choices = self._plan, self._choices
        argument = Argument(
            servers=plan.servers,
            flow=self._flow,
            source=plan.source,
            target=plan.target,
            master=master,
            config=config,
            trigger_ms=choices.trigger_ms,
            copies=choices.copies,
            log=str(self._folder / "batches.jsonl"),
            parent=os.getpid(),
        )
        command = [sys.executable, "-m", "onceflow_workshop.bench.cluster_service", argument.to_json()]
        environment = {
            "ONCEFLOW_STATE_DIR": str(folder / "state"),
            "TMPDIR": str(folder / "tmp"),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        log = folder / "log"
        with process(command, log, environment) as started:
            self._ended = lambda: ended(started, log)
            self._driver = Usage([started.pid])
            yield
            self._look()
        self._ended = lambda: ""

    def _until_visible(self, what: str, seconds: float = 0.0) -> None:
        def done() -> bool:
            seen: Seen = self._load.look()
            return seen.visible == seen.sent

        self._wait(done, _VISIBLE_S + seconds, what)

    def _pause(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait, but no longer than this. Returns whether the condition holds."""
        end, holds = time.monotonic() + seconds, False

        def over() -> bool:
            nonlocal holds
            holds = condition()
            return holds or time.monotonic() >= end

        self._wait(over, seconds + _VISIBLE_S, "time passes")
        return holds

    def _wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if reason := self._ended():
                raise EnvironmentUnusableError(
                    "The service of the benchmark has ended.",
                    flow=self._flow,
                    detail=reason,
                    next_step="run `onceflow doctor`, which checks this machine",
                )
            if time.monotonic() > end:
                seen = self._load.look()
                raise DeadlineExceededError(
                    f"It did not happen within {seconds:g} s: {what}",
                    flow=self._flow,
                    detail=f"{seen.sent:,} records sent, {seen.visible:,} have come out",
                    next_step="give the cluster less to do: --rate, --workers, --accounts",
                )
            self._look()
            self._clock.tick()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Look from time to time: of a process that has ended, nothing can be read any more."""
        if time.monotonic() > self._looked + _LOOK_S:
            self._looked = time.monotonic()
            self._executors.look()
            self._driver.look()

    def _restart_meters(self) -> None:
        self._executors.restart()
        self._driver.restart()

    def _cpu_s(self) -> dict[str, float]:
        """Since the restart."""
        self._executors.look()
        self._driver.look()
        return {"executors": self._executors.cpu_s_since, "driver": self._driver.cpu_s_since}


def _wrong(seen: Seen) -> str:
    """What is wrong with what has come out so far."""
    found = {"doubled": seen.doubled, "wrong": seen.wrong}
    return ", ".join(f"{count:,} {what}" for what, count in found.items() if count)
