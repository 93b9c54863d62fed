"""A chaos run: for each setup it injects faults one by one, and then checks everything that was written."""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from onceflow.errors import DeadlineExceededError
from onceflow.planning.engine import ENGINES
from onceflow.protocol.position import Position
from onceflow.testing import independent
from onceflow_workshop.chaos import external
from onceflow_workshop.chaos.driver_process import Engines
from onceflow_workshop.chaos.fault_kinds import FAULT_KINDS
from onceflow_workshop.chaos.flows import ALARM_EVERY, LEDGER
from onceflow_workshop.chaos.observer import Observer
from onceflow_workshop.chaos.test_bed import AHEAD_MS, SETUPS, Setup, TestBed, open_test_bed
from onceflow_workshop.chaos.topic_changes import has_letters, replay
from onceflow_workshop.chaos.verify import Findings, check_state, verify, verify_answers
from onceflow_workshop.demos.display import Display, print_result

FIRST_COMMIT_S = 180.0
# A broker may have to come back, a transaction may have to time out, and Spark may have to start.
RECOVERY_S = 180.0
DRAIN_S = 240.0
# For each setup, even if its start took long.
MIN_FAULTS = 3


@dataclass
class Injected:
    """A fault that happened.

    Args:
        back_s: seconds from the fault until every flow had committed again; None: another fault came at once.
    """

    setup: str
    kind: str
    what: str
    at_s: float
    back_s: float | None = None


@dataclass
class Report:
    """The report of a whole run."""

    seed: int
    injected: list[Injected] = field(default_factory=list)
    findings: dict[str, Findings] = field(default_factory=dict)
    stops: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    answers: int = 0
    engines: Engines = field(default_factory=Engines)
    driver_kills: int = 0
    traffic: Counter[str] = field(default_factory=Counter)
    observed: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        verdicts = {finding.verdict for finding in self.findings.values()}
        if "failed" in verdicts:
            return "failed"
        return "unknown" if "unknown" in verdicts or not verdicts else "passed"

    def recovery(self) -> dict[str, dict[str, float]]:
        """Seconds from a fault to the next commit of every flow, by kind."""
        by_kind: dict[str, list[float]] = defaultdict(list)
        for fault in self.injected:
            if fault.back_s is not None:
                by_kind[fault.kind].append(fault.back_s)
        return {
            kind: {"median_s": round(statistics.median(times), 1), "worst_s": round(max(times), 1)}
            for kind, times in sorted(by_kind.items())
        }

    def as_json(self) -> dict[str, Any]:
        every = list(self.findings.values())
        return {
            "faults": len(self.injected),
            "kinds": dict(sorted(Counter(fault.kind for fault in self.injected).items())),
            "frames": dict(self.frames),
            "records": sum(finding.records for finding in every),
            "batches": self.batches,
            "driver_kills": self.driver_kills,
            "engines": self.engines.as_json(),
            "traffic": dict(self.traffic),
            "answers": self.answers,
            "host_copies": sum(finding.host_copies for finding in every),
            **({"observed": self.observed} if self.observed else {}),
            "lost": sum(finding.lost for finding in every),
            "duplicated": sum(finding.duplicated for finding in every),
            "torn": sum(finding.torn for finding in every),
            "others": dict(sum((finding.others for finding in every), Counter())),
            "stops": dict(self.stops),
            "recovery": self.recovery(),
            "setups": {name: finding.verdict for name, finding in self.findings.items()},
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict,
            "seed": self.seed,
        }


def run(
    *,
    seconds: float,
    seed: int,
    setups: Sequence[str],
    kinds: Sequence[str] = (),
    flows: Sequence[str] = (),
    engines: Sequence[str] = ENGINES,
    observe: bool = False,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Inject faults for about this long, divided evenly among the setups. Each setup gets at least ``MIN_FAULTS``.

    Args:
        kinds: kinds of faults, keys of ``FAULT_KINDS``. When empty, all that make sense in a setup.
        flows: kinds of flows, instead of those of the setups. Query servers need the ledger.
        engines: each start of a flow has one of these, as the seed says.
        observe: run the commands of operators beside the flows, and check what they say.
        keep: folder in which logs and histories are kept; None: they are deleted.

    Returns:
        The report. Its ``verdict`` is ``passed`` only when nothing was wrong.
    """
    report = Report(seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onceflow-chaos-", ignore_cleanup_errors=True) as scratch:
        base = Path(scratch) if keep is None else keep
        with Display({"seconds": int(seconds)}) as display:
            for number, name in enumerate(setups, 1):
                display.say(f"{name}: {number} of {len(setups)} setups; seed {seed}")
                until = started + seconds * number / len(setups)
                setup = _with_flows(SETUPS[name], flows)
                _run_setup(setup, base / name, report, until, kinds, display, started, engines, observe=observe)
    report.seconds = time.monotonic() - started
    print_result([_table(report)], [example for f in report.findings.values() for example in f.examples + f.unknown])
    return report.as_json()


def _with_flows(setup: Setup, flows: Sequence[str]) -> Setup:
    if not flows:
        return setup
    return replace(setup, flows=tuple(flows), servers=setup.servers if LEDGER in flows else 0)


def _run_setup(
    setup: Setup,
    folder: Path,
    report: Report,
    until: float,
    kinds: Sequence[str],
    display: Display,
    started: float,
    engines: Sequence[str],
    *,
    observe: bool,
) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(f"{report.seed} {setup.name}")
    possible = {
        kind: fault for kind, fault in FAULT_KINDS.items() if fault.possible(setup) and (not kinds or kind in kinds)
    }
    weights = [fault.weight for fault in possible.values()]
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(open_test_bed(setup, folder, engines=engines, seed=f"{report.seed} {setup.name}"))
        begun = time.monotonic()
        bed.driver.start()
        bed.driver.await_commits(begun, timeout_s=FIRST_COMMIT_S)
        if setup.servers:
            bed.servers.start()
        observer = stack.enter_context(_observer(bed)) if observe else None
        before = len(report.injected)
        findings = Findings()
        while possible and (time.monotonic() < until or len(report.injected) - before < MIN_FAULTS):
            display.count(seconds=int(time.monotonic() - started))
            (kind,) = rng.choices(list(possible), weights)
            at = time.monotonic()
            what = possible[kind].inject(bed, rng)
            fault = Injected(setup.name, kind, what, at - started)
            report.injected.append(fault)
            if rng.random() < 0.8:  # otherwise the next fault comes before the flows have recovered
                healed = time.monotonic()
                fault.back_s = healed - at + bed.driver.await_commits(healed, timeout_s=RECOVERY_S)
                display.say(f"{setup.name}: {what}; all flows had committed again after {fault.back_s:.1f} s")
                time.sleep(rng.uniform(0.0, 2.0))
            else:
                display.say(f"{setup.name}: {what}; the next fault follows at once")
            _look(bed, findings)
        _drain(bed, display)
        bed.end_copy()
        report.stops += bed.driver.stops
        report.frames += bed.frames
        report.batches += bed.driver.commits.count
        report.driver_kills += bed.driver.kills
        report.engines.add(bed.driver.commits.engines)
        report.traffic.update({"quiet times": bed.feeder.quiet_times, "bursts": bed.feeder.bursts})
        report.answers += len(bed.servers.answers)
        verify(
            bed.bootstrap_servers,
            bed.names,
            setup.flows,
            findings,
            copies=bed.copies,
            replays=has_letters(setup),
            states=[bed.names.state, *bed.states] if setup.own_hosts else None,
        )
        verify_answers(bed.bootstrap_servers, bed.names, bed.servers.answers, bed.servers.strange, findings)
        if observer is not None:
            observer.finish(findings)
            report.observed[setup.name] = observer.as_json()
        for stop in bed.driver.strange:
            findings.see("stopped by an error that is not onceflow's", f"{stop.error}: {stop.text[:300]}")
        report.findings[setup.name] = findings
        display.say(f"{setup.name}: {findings.records:,} records, {findings.verdict}")


def _observer(bed: TestBed) -> Observer:
    committed = bed.driver.commits.batches
    lossy = bed.setup.copies == 1
    observer = Observer(
        bed.bootstrap_servers,
        bed.names,
        bed.setup.flows,
        committed,
        markers_get_lost=lossy,
        copies_get_torn=bed.setup.workers > 0,
        copies_on_hosts=bed.setup.own_hosts,
    )
    observer.start()
    return observer


def _look(bed: TestBed, findings: Findings) -> None:
    """Look into the other systems, while flows write them."""
    for kind in external.KINDS:
        if kind in bed.setup.flows:
            check_state(kind, bed.names.target(kind).state(), findings)


def _has_read(servers: str, flow: str, ends: Mapping[tuple[str, int], int]) -> bool:
    """Whether a flow has read its source. A broker that was just killed may not answer yet."""
    try:
        return independent.committed_offsets(servers, flow) == ends
    except futures.TimeoutError:  # before Python 3.11 not the built-in one
        return False


def _drain(bed: TestBed, display: Display) -> None:
    """End all faults, make all timers due, and wait until the flows have processed the whole source."""
    names, servers = bed.names, bed.bootstrap_servers
    bed.feeder.stop()
    bed.proxies.faults(None)
    names.clock.write_text(str(AHEAD_MS + 60_000))
    display.say("waiting until all records are processed")
    ends = independent.end_offsets(servers, names.source)
    waiting = set(bed.setup.flows)
    end = time.monotonic() + DRAIN_S
    while waiting:
        bed.driver.revive()
        waiting -= {k for k in waiting if _has_read(servers, names.flow(k), ends)}
        _check_time(end, bed, f"flows that are behind: {sorted(waiting)}")
        time.sleep(1.0)
    if LEDGER in bed.setup.flows:
        alarms = -(-bed.feeder.sent // ALARM_EVERY)
        while len(independent.read_topic(servers, names.alarms)) < alarms:
            bed.driver.revive()
            _check_time(end, bed, f"fewer than {alarms} alarms")
            time.sleep(0.5)
    bed.driver.end()
    if has_letters(bed.setup):
        replay(bed.commands, names)
    if bed.setup.servers:
        found = independent.end_offsets(servers, names.table)
        position = Position({names.table: {partition: offset for (_, partition), offset in found.items()}})
        bed.servers.finish(str(position), max(30.0, end - time.monotonic()))


def _check_time(end: float, bed: TestBed, problem: str) -> None:
    if time.monotonic() > end:
        raise DeadlineExceededError(
            f"The flows were not done within {DRAIN_S:g} s after the last fault",
            detail=f"{problem}\n{bed.driver.log_tail()}",
            next_step=f"see {bed.names.folder / 'drivers.log'} (with --keep)",
        )


def _table(report: Report) -> Table:
    table = Table(title="Faults, and how long until every flow had committed again")
    for name in ("kind", "faults", "median", "worst"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    recovery = report.recovery()
    for kind, count in sorted(Counter(fault.kind for fault in report.injected).items()):
        times = recovery.get(kind)
        table.add_row(kind, str(count), *(f"{s:.1f} s" for s in (times or {}).values()))
    return table
