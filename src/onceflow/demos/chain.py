"""One run of a chain of flows over generated deposits: produce, process, kill, audit, report.

What all demos have in common; a demo says which flows there are, what must be in which topic, and what else to look at.
"""

from __future__ import annotations

import abc
import contextlib
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from onceflow.broker.local import LocalBroker
from onceflow.broker.process import admin_client
from onceflow.client.deadline import Deadline
from onceflow.demos import deposits_data as data
from onceflow.demos.audit import Expected, Findings, compare
from onceflow.demos.display import Display, print_result, services_table, topics_table
from onceflow.demos.generator import Generator
from onceflow.demos.harness import Kill, Service, Supervisor, plan_kills, plan_losses
from onceflow.demos.reading import GroupLag, read_topic
from onceflow.errors import OptionError
from onceflow.testing.broker import create_topic

SERVICES = Path(__file__).parent / "services"
# So many batches leave room for kills between them; so few keep the fixed cost of a batch small.
BATCHES_PER_LIFE = 5
RECORDS_PER_BATCH_MIN = 100
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Choices:
    """Options of the command."""

    records: int = 200_000
    seed: int = 0
    kills: int = 3
    bootstrap_servers: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Link:
    """One flow of the chain.

    Args:
        flow: its name.
        source: the topic it reads.
        done: what a record that it is through with counts as, on the display.
        script, arguments: how its process is started: a file in ``services``, and what comes before the options.
        keeps_state: it is given ``--state-dir``; after some of its deaths, what is in there is deleted.
    """

    flow: str
    source: str
    done: str
    script: str
    arguments: tuple[str, ...] = ()
    keeps_state: bool = False


@dataclass
class Audit:
    """What was found when all was done.

    Args:
        topics: findings per topic, in the order of the demo's topics.
        hidden: records of aborted transactions per topic.
        problems: whatever else is wrong, one line each; the demo has failed if there are any.
        tables: more to show. facts: more for the last line.
    """

    topics: list[Findings] = field(default_factory=list)
    hidden: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Chain(abc.ABC):
    """One run of a demo.

    Args:
        folder: for the logs, local state and whatever killed processes leave behind.
        deadline: of the whole run.
    """

    name: ClassVar[str]
    #: Of the topics that the demo makes. Different counts on purpose: a record must be placed anew in every topic.
    partitions: ClassVar[Mapping[str, int]]
    #: In the order of the flow of records.
    links: ClassVar[Sequence[Link]]

    def __init__(self, choices: Choices, bootstrap_servers: str, folder: Path, deadline: Deadline) -> None:
        self.choices = choices
        self.servers = bootstrap_servers
        self.deadline = deadline
        self.state_dir = folder / "state"
        # Names are new in every run: on a shared cluster, an earlier run has left its progress there.
        self.suffix = f"-{uuid.uuid4().hex[:6]}"
        self.topics = {name: name + self.suffix for name in self.partitions}
        # A flow reads a bit less than the bound and the next some control records more: never fewer batches.
        self.batches = BATCHES_PER_LIFE * (choices.kills + 1)
        self.records_per_batch = choices.records // self.batches
        rng = random.Random(f"kills-{choices.seed}")
        self.services = [self._service(link, rng, folder) for link in self.links]
        self._generator = Generator(
            bootstrap_servers, self.topics["deposits"], self.deposits(), records=choices.records
        )

    def _service(self, link: Link, rng: random.Random, folder: Path) -> Service:
        command = [sys.executable, str(SERVICES / link.script), *link.arguments]
        command += ["--bootstrap-servers", self.servers, f"--suffix={self.suffix}"]
        command += ["--batch", str(self.records_per_batch)]
        kills = self.plan(rng)
        flow = link.flow + self.suffix
        if not link.keeps_state:
            return Service(flow, command, kills, folder)
        command += ["--state-dir", str(self.state_dir)]
        return Service(flow, command, plan_losses(kills, rng=rng), folder, state=self.state_dir / flow)

    # ---- what a demo adds ----------------------------------------------------------------------------

    @abc.abstractmethod
    def expected(self, origins: Mapping[str, data.Origin]) -> Mapping[str, Iterable[Expected]]:
        """The records that every topic of ``partitions`` must hold, in its order.

        Args:
            origins: where the broker put the deposits that are to be rejected.
        """

    def plan(self, rng: random.Random) -> list[Kill]:
        """The kills of one flow. Asked once for each of ``links``, in order, with the same ``rng``."""
        return plan_kills(self.choices.kills, batches=self.batches, rng=rng)

    def judge(self, name: str, finding: Findings) -> list[str]:
        """What is wrong with a topic, one line each."""
        return finding.examples

    def look_further(self, audit: Audit, display: Display) -> None:
        """Audit what is no topic of records, when the topics have been audited."""
        return

    def more_topics(self) -> list[str]:
        """Topics that the flows made."""
        return []

    def deposits(self) -> Iterator[data.Deposit]:
        """The input, from the seed."""
        return data.generate(self.choices.seed, self.choices.records)

    # ---- the run -------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """All of it. The verdict, as it is printed."""
        valid = sum(deposit.cause is None for deposit in self.deposits())
        totals = {"produced": self.choices.records}
        totals |= {link.done: self.choices.records if link.source == "deposits" else valid for link in self.links}
        totals["kills"] = len(self.links) * self.choices.kills
        with Display(totals) as display:
            display.say(f"seed {self.choices.seed}, brokers {self.servers}")
            for name, topic in self.topics.items():
                create_topic(self.servers, topic, self.partitions[name])
            self._generator.start()
            try:
                self.process(display)
            finally:
                self._generator.leave.set()
                self._generator.join(10.0)
            display.say("every record is through; reading all topics")
            audit = self.audit(display)
        return self.report(audit)

    def process(self, display: Display) -> None:
        """All services run, and die, until nothing is left to read."""
        self.run_together(range(len(self.links)), display)

    def await_source(self, display: Display) -> None:
        """All deposits are in their topic: for a demo whose flows all find the same there."""
        while not self._generator.check():
            if self.deadline.expired:
                raise self.deadline.error(f"{self._generator.delivered} deposits are produced")
            display.count(produced=self._generator.delivered)
            self._generator.join(_LOOK_EVERY_S / 10)
        display.count(produced=self._generator.delivered)

    def run_together(self, which: Iterable[int], display: Display) -> None:
        """Some of the services run, and die, until nothing is left for them to read; then they are stopped."""
        services, links = zip(*((self.services[n], self.links[n]) for n in which), strict=True)
        with contextlib.ExitStack() as stack:
            lags = []
            for service, link in zip(services, links, strict=True):
                lag = GroupLag(self.servers, service.flow, self.topics[link.source], self.partitions[link.source])
                stack.callback(lag.close)
                lags.append(lag)
            supervisor = stack.enter_context(Supervisor(services))
            looked_at = 0.0

            def done() -> bool:
                nonlocal looked_at
                self._tell_deaths(display)
                if time.monotonic() - looked_at < _LOOK_EVERY_S:
                    return False
                looked_at = time.monotonic()
                complete = self._generator.check()
                # In this order: once a flow is through, the end of what the next one reads does not move any more.
                reached = [found for found in (lag.read() for lag in lags) if found is not None]
                if len(reached) < len(lags):
                    return False  # never judged by an older look
                through = {link.done: offset for link, (offset, _) in zip(links, reached, strict=True)}
                display.count(produced=self._generator.delivered, **through, kills=self.kills)
                return complete and all(offset == end for offset, end in reached)

            supervisor.run(done, self.deadline)
            display.count(kills=self.kills)
            display.say(f"stopping {', '.join(service.flow for service in services)}")
            supervisor.stop()

    @property
    def kills(self) -> int:
        """How many have happened."""
        return sum(len(service.deaths) for service in self.services)

    def _tell_deaths(self, display: Display) -> None:
        for service in self.services:
            for death in service.deaths[sum(d.told for d in service.deaths) :]:
                death.told = True
                lost = ", local state deleted" if death.lost_state else ""
                place = f"batch {death.batch} committed" if death.in_batch is None else f"in batch {death.in_batch}"
                display.say(f"{service.flow}: SIGKILL after step {death.step} ({place}){lost}")

    def audit(self, display: Display) -> Audit:
        """Read everything with an independent consumer, and compare."""
        audit = Audit()
        for name, records in self.expected(self._generator.origins).items():
            topic = self.topics[name]
            found = read_topic(self.servers, topic, self.deadline)
            finding = compare(topic, records, found, partitions=self.partitions[name], identify=data.identify)
            audit.topics.append(finding)
            audit.problems += self.judge(name, finding)
            display.say(f"{topic}: {finding.found:,} records read, {finding.expected:,} expected")
            if name != "deposits":
                everything = read_topic(self.servers, topic, self.deadline, isolation="read_uncommitted")
                audit.hidden[topic] = sum(1 for _ in everything) - finding.found
        self.look_further(audit, display)
        missed = sum(service.planned - len(service.deaths) for service in self.services)
        if missed:
            audit.problems.append(f"{missed} of the planned kills did not happen")
        return audit

    def report(self, audit: Audit) -> dict[str, Any]:
        """Print what was found; the last line."""
        tables = [topics_table(audit.topics, audit.hidden), *audit.tables, services_table(self.services)]
        print_result(tables, audit.problems)
        counts = [sum(column) for column in zip(*(finding.counts.values() for finding in audit.topics), strict=True)]
        lost, duplicated, *others = counts
        found = {name: finding.found for name, finding in zip(self.topics, audit.topics, strict=True)}
        return {
            "demo": self.name,
            "in": found.pop("deposits"),
            **found,
            "lost": lost,
            "duplicated": duplicated,
            "wrong": sum(others),
            **audit.facts,
            "kills": self.kills,
            **self.ending(failed=bool(audit.problems) or any(counts)),
        }

    def ending(self, *, failed: bool) -> dict[str, Any]:
        """What every last line ends with."""
        return {
            "seconds": round(self.deadline.seconds - self.deadline.remaining, 1),
            "seed": self.choices.seed,
            "verdict": "failed" if failed else "passed",
        }


def run_chain(kind: type[Chain], choices: Choices) -> dict[str, Any]:
    """Run a demo; the result is what its last line says. Leaves nothing behind unless it fails.

    Raises:
        OptionError: too few records for so many kills.
        OnceflowError: it could not be brought to its end; the logs are kept.
    """
    least = RECORDS_PER_BATCH_MIN * BATCHES_PER_LIFE * (choices.kills + 1)
    if choices.records < least:
        raise OptionError(
            f"{choices.records} records are too few for {choices.kills} kills per flow",
            next_step=f"use at least --records {least}, or fewer --kills",
        )
    deadline = Deadline(choices.timeout_s, f"the demo {kind.name}")
    folder = Path(tempfile.mkdtemp(prefix="onceflow-demo-"))
    keep = False
    try:
        with contextlib.ExitStack() as stack:
            servers = choices.bootstrap_servers
            if servers is None:
                sys.stderr.write("starting a broker\n")
                servers = stack.enter_context(LocalBroker(folder / "broker", heap="512m")).bootstrap_servers
            chain = kind(choices, servers, folder, deadline)
            result = chain.run()
            keep = result["verdict"] != "passed"
            if choices.bootstrap_servers is not None and not keep:
                _delete(servers, [*chain.topics.values(), *chain.more_topics()])
            return result
    except Exception:
        keep = True
        raise
    finally:
        if keep:
            sys.stderr.write(f"logs and data are kept in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _delete(bootstrap_servers: str, topics: list[str]) -> None:
    with admin_client(bootstrap_servers, {}) as admin:
        for future in admin.delete_topics(topics, operation_timeout=30).values():
            with contextlib.suppress(Exception):  # the audit is done; a topic that stays does no harm
                future.result(30)
