"""Latency, processor time and memory of a running service, at a steady rate: ``onceflow bench latency``.

The service is a process of its own (``service.py``). Records are sent to it from its start on. Those that
are sent after the warm-up count. Then nothing is sent any more, and what the idle service takes is measured.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.errors import EnvironmentUnusableError
from onceflow.planning.engine import AUTO
from onceflow_workshop.bench import latency
from onceflow_workshop.bench.balance_runs import table_topics
from onceflow_workshop.bench.environment import Bench
from onceflow_workshop.bench.latency_records import BALANCE, COPY, records_of
from onceflow_workshop.bench.processes import Usage, machine_busy_s
from onceflow_workshop.bench.service_process import ended, service

PERCENTS = (50, 95, 99)
_B_WORKLOADS = {COPY: "w1", BALANCE: "w2"}
_LOOK_S = 0.5
# The compilers of the JVMs still work for a moment on what they were asked for under load.
_SETTLE_SECONDS = 2.0
# For the progress bar only.
_START_SECONDS = 10.0

#: Shows what is going on: a text, and how many seconds of how many are over.
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Setting:
    """One service, and what it is given.

    Args:
        workload: of `latency_records.WORKLOADS`. engine: of ENGINES.
        trigger_ms: how often it commits. value_bytes: of `records_of`.
    """

    workload: str = COPY
    engine: str = AUTO
    trigger_ms: int = 100
    records_per_second: int = 2000
    value_bytes: int | None = None

    @property
    def words(self) -> dict[str, str]:
        """What it is, in words, by kind."""
        return {
            "workload": self.workload,
            "engine": f"engine {self.engine}",
            "trigger": f"{self.trigger_ms} ms",
            "rate": f"{self.records_per_second:,} records/s",
        }


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        warm_seconds: after the first output, which do not count. seconds: how long records count.
        idle_seconds: how long the idle service is measured; 0: not at all.
        servers: of a running cluster; None: a broker is started.
    """

    settings: Sequence[Setting]
    warm_seconds: float = 15.0
    seconds: float = 30.0
    idle_seconds: float = 5.0
    servers: str | None = None


@dataclass(frozen=True)
class Measured:
    """One setting: its figures (a JSON object), and the milliseconds of each record that counts."""

    setting: Setting
    figures: dict[str, Any]
    latencies_ms: list[float]


def settings_of(
    workloads: Sequence[str],
    engines: Sequence[str],
    triggers_ms: Sequence[int],
    rates: Sequence[int],
    value_bytes: int | None,
) -> list[Setting]:
    """Every combination, each once."""
    every = itertools.product(workloads, triggers_ms, rates, engines)
    return list(dict.fromkeys(Setting(what, engine, ms, rate, value_bytes) for what, ms, rate, engine in every))


def labels_of(settings: Sequence[Setting]) -> list[str]:
    """What tells them apart, in words; of a single one, everything."""
    words = [setting.words for setting in settings]
    differ = [kind for kind in words[0] if len({each[kind] for each in words}) > 1] if len(words) > 1 else [*words[0]]
    return [", ".join(each[kind] for kind in differ) for each in words]


def run(choices: Choices, show: Show) -> Iterator[Measured]:
    """Measure one setting after the other.

    Raises:
        EnvironmentUnusableError: a service did not run; with its last words.
        BrokerUnreachableError: topics could not be created.
    """
    from onceflow.broker.local import LocalBroker

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, ExitStack() as stack:
        clock = _Clock(choices, show)
        clock.say("starting a broker" if choices.servers is None else "connecting")
        pids: tuple[int, ...] = ()
        if choices.servers is None:
            broker = stack.enter_context(LocalBroker(Path(folder) / "broker"))
            servers, pids = broker.bootstrap_servers, tuple(broker.status().pids)
        else:
            servers = choices.servers
        bench = Bench(None, servers, pids, Path(folder), lambda text: None)
        for setting, label in zip(choices.settings, labels_of(choices.settings), strict=True):
            clock.begin(label)
            yield _Run(bench, choices, setting, clock).run()


class _Clock:
    """Turns what is going on into seconds that are over, for the progress bar."""

    def __init__(self, choices: Choices, show: Show) -> None:
        settle = _SETTLE_SECONDS if choices.idle_seconds else 0.0
        self._lengths = {
            latency.STARTING: _START_SECONDS,
            latency.WARMING: choices.warm_seconds,
            latency.MEASURING: choices.seconds,
            latency.DRAINING: 1.0,
            "idle": settle + choices.idle_seconds,
        }
        self._each = sum(self._lengths.values())
        self._total = self._each * len(choices.settings)
        self._show = show
        self._before, self._label = -self._each, ""
        self._phase, self._since = "", time.monotonic()

    def begin(self, label: str) -> None:
        """The next setting."""
        self._before += self._each
        self._label, self._phase = f"{label}: ", ""

    def phase(self, phase: str) -> None:
        """This is going on; may be called again and again."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._since = phase, now
        before = sum(list(self._lengths.values())[: list(self._lengths).index(phase)])
        within = min(now - self._since, self._lengths[phase])
        self.say(phase, self._before + before + within)

    def say(self, text: str, done: float = 0.0) -> None:
        self._show(self._label + text, round(done), round(self._total))


class _Run:
    """One setting."""

    def __init__(self, bench: Bench, choices: Choices, setting: Setting, clock: _Clock) -> None:
        self._bench, self._choices, self._setting, self._clock = bench, choices, setting, clock
        self._flow = f"bench-latency-{uuid.uuid4().hex[:8]}"
        self._figures: dict[str, Any] = {}

    def run(self) -> Measured:
        bench = self._bench
        source, target = bench.topic(f"{self._flow}-in"), bench.topic(f"{self._flow}-out")
        folder = bench.folder / self._flow
        folder.mkdir()
        try:
            with service(self._environment(source, target, folder), folder / "log") as started:
                probed = self._probed(started, folder / "log", source, target)
                self._idle(started.pid)
            return self._measured(probed, folder)
        finally:
            bench.delete(source, target, *table_topics(self._flow))
            if self._choices.servers is not None:
                self._forget()

    def _environment(self, source: str, target: str, folder: Path) -> dict[str, str]:
        given = {} if self._setting.engine == AUTO else {"B_ENGINE": self._setting.engine}
        return {
            "B_WORKLOAD": _B_WORKLOADS[self._setting.workload],
            "B_BOOTSTRAP": self._bench.servers,
            "B_NAME": self._flow,
            "B_IN": source,
            "B_OUT": target,
            "B_COMMIT_MS": str(self._setting.trigger_ms),
            "B_STATE": str(folder),
            "B_RAN": str(folder / "ran"),
            **given,
        }

    def _probed(self, started: Any, log: Path, source: str, target: str) -> latency.Probed:
        begun = time.monotonic()
        meters = _Meters(started.pid, self._bench.broker_pids)
        last = latency.STARTING

        def watch(phase: str) -> None:
            nonlocal last
            if phase != last:
                if last == latency.STARTING:
                    self._figures["first_output_s"] = round(time.monotonic() - begun, 2)
                if phase == latency.MEASURING:
                    meters.restart()
                if last == latency.MEASURING:
                    self._figures.update(meters.figures())
                last = phase
            meters.look()
            self._clock.phase(phase)

        setting, choices = self._setting, self._choices
        plan = latency.Plan(
            self._bench.servers,
            source,
            target,
            setting.records_per_second,
            choices.warm_seconds,
            choices.seconds,
            setting.workload,
            setting.value_bytes,
        )
        try:
            return latency.measure(plan, lambda: started.poll() is None, watch)
        except RuntimeError as error:
            raise EnvironmentUnusableError(
                f"The service of the benchmark was not measured: {error}",
                flow=self._flow,
                detail=ended(started, log),
                next_step="run `onceflow doctor`, which checks this machine",
            ) from error

    def _idle(self, pid: int) -> None:
        seconds = self._choices.idle_seconds
        meters = _Meters(pid, self._bench.broker_pids)
        begun = time.monotonic()
        settled = False
        while seconds and (now := time.monotonic()) < begun + _SETTLE_SECONDS + seconds:
            if not settled and now >= begun + _SETTLE_SECONDS:
                settled = True
                meters.restart()
            meters.look()
            self._clock.phase("idle")
            time.sleep(0.1)
        found: Mapping[str, Any] = meters.figures() if settled else {}
        self._figures["idle_cpu_percent"] = found.get("cpu_percent")
        self._figures["idle_broker_cpu_percent"] = found.get("broker_cpu_percent")

    def _measured(self, probed: latency.Probed, folder: Path) -> Measured:
        seen, setting = probed.latencies_ms, self._setting
        problem = probed.problem or ("" if seen else "no record of the measured time came out")
        ran = json.loads((folder / "ran").read_text()) if (folder / "ran").exists() else {"engine": None, "paths": []}
        figures = {
            "bench": "latency",
            "workload": setting.workload,
            "engine": setting.engine,
            "ran_by": ran["engine"],
            "path": "/".join(ran["paths"]),
            "trigger_ms": setting.trigger_ms,
            "records_per_second": setting.records_per_second,
            "value_bytes": len(records_of(setting.workload, setting.value_bytes).record(0)[1]),
            **{f"p{percent}_ms": _rounded(latency.percentile(seen, percent)) if seen else None for percent in PERCENTS},
            "max_ms": _rounded(max(seen)) if seen else None,
            **self._figures,
            "records": len(seen),
            "correct": problem or "yes",
        }
        return Measured(setting, figures, seen)

    def _forget(self) -> None:
        """Nothing of the flow is left in somebody's cluster."""
        from onceflow.admin.change.reset import reset
        from onceflow.client.settings import ClientSettings
        from onceflow.protocol.names import Names

        reset(ClientSettings(self._bench.servers), Names(self._flow), [])


class _Meters:
    """What the service, the broker and everybody else on this machine use."""

    def __init__(self, service_pid: int, broker_pids: Sequence[int]) -> None:
        self._service, self._broker = Usage([service_pid]), Usage(broker_pids)
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._service.restart()
        self._broker.restart()
        self._busy_s, self._begun = machine_busy_s(), time.monotonic()
        self._looked = self._begun

    def look(self) -> None:
        """Look from time to time: of a process that has ended, nothing can be read any more."""
        if time.monotonic() > self._looked + _LOOK_S:
            self._looked = time.monotonic()
            self._service.look()

    def figures(self) -> dict[str, Any]:
        """Percent of a core, and the most memory in MiB. What cannot be known is None."""
        own, broker = self._service.cpu_percent(), self._broker.cpu_percent()
        busy_s, seconds = machine_busy_s(), time.monotonic() - self._begun
        others = None
        if busy_s is not None and self._busy_s is not None:
            others = 100 * (busy_s - self._busy_s) / seconds - (own or 0.0) - (broker or 0.0)
        return {
            "cpu_percent": _rounded(own),
            "broker_cpu_percent": _rounded(broker),
            "others_cpu_percent": _rounded(others),
            "max_rss_mib": _rounded(self._service.max_rss_mib),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
