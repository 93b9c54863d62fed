"""One run of flows over generated records: produce, process, kill, audit, report.

What all demos have in common; a demo says which flows there are, what must be in which topic, and what else to look at.
"""

from __future__ import annotations

import abc
import contextlib
import random
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from onceflow.client.deadline import Deadline
from onceflow.errors import OptionError
from onceflow.testing.broker import create_topic
from onceflow_workshop.demos.audit import Expected, Findings, Message, Origin, compare
from onceflow_workshop.demos.display import Display, print_result, services_table, topics_table
from onceflow_workshop.demos.generator import Generator, Input
from onceflow_workshop.demos.harness import Kill, Service, Supervisor, plan_kills, plan_losses
from onceflow_workshop.demos.reading import GroupLag, Tally, read_topic
from onceflow_workshop.demos.workplace import workplace

# So many batches leave room for kills between them; so few keep the fixed cost of a batch small.
BATCHES_PER_LIFE = 5
_LOOK_EVERY_S = 1.0
# A flow that has read everything, and writes nothing more for so long, will not.
_SETTLED_S = 60.0


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
    """One flow of the demo, a process of its own.

    Args:
        flow: its name.
        sources: the topics it reads.
        done: label of its processed records on the display.
        script, arguments: the Python file of its process, and the arguments before the options.
        keeps_state: it gets ``--state-dir``. After some kills, that folder is deleted.
        share: the part of the demo's records that it reads. Kills are planned over its batches.
        at_most_once: its progress is committed before its calls are made and its outputs are written. It may have read
            everything and still write, so it is stopped before the flows that read its outputs are judged.
    """

    flow: str
    sources: tuple[str, ...]
    done: str
    script: Path
    arguments: tuple[str, ...] = ()
    keeps_state: bool = False
    share: float = 1.0
    at_most_once: bool = False


@dataclass
class Audit:
    """What was found when all records were processed.

    Args:
        topics: findings per topic, in the order of the demo's topics.
        hidden: records of aborted transactions per topic.
        problems: everything else that is wrong, one line each. The demo fails if there are any.
        tables: further tables to show. facts: further fields of the last line.
    """

    topics: list[Findings] = field(default_factory=list)
    hidden: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def found(self, topics: Iterable[str]) -> int:
        """How many records there are in some of the topics."""
        names = set(topics)
        return sum(finding.found for finding in self.topics if finding.topic in names)


class Chain(abc.ABC):
    """One run of a demo.

    Args:
        folder: for logs, local state, and files that killed processes leave behind.
        deadline: for the whole run.
    """

    name: ClassVar[str]
    #: Partitions of the demo's topics. They differ, so that a record is placed anew in every topic.
    partitions: ClassVar[Mapping[str, int]]
    #: Configuration of these topics, where it is not the broker's.
    configs: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: In the order of the flow of records.
    links: ClassVar[Sequence[Link]]
    #: Topics that are filled, that hold the results, and that hold what could not be processed.
    inputs_of: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    dead_letters: ClassVar[tuple[str, ...]] = ()
    #: Smaller batches would not be realistic.
    min_records_per_batch: ClassVar[int] = 100
    #: A longer run than that has more batches, not larger ones.
    max_records_per_batch: ClassVar[int | None] = None

    def __init__(self, choices: Choices, bootstrap_servers: str, folder: Path, deadline: Deadline) -> None:
        self.choices = choices
        self.servers = bootstrap_servers
        self.deadline = deadline
        self.folder = folder
        self.state_dir = folder / "state"
        # Names are new in every run: on a shared cluster, an earlier run has left its progress there.
        self.suffix = f"-{uuid.uuid4().hex[:6]}"
        self.topics = {name: name + self.suffix for name in self.partitions}
        # A flow reads a bit less than the bound and the next some control records more: never fewer batches.
        self.batches = BATCHES_PER_LIFE * (choices.kills + 1)
        self.records_per_batch = max(1, choices.records // self.batches)
        if self.max_records_per_batch is not None and self.records_per_batch > self.max_records_per_batch:
            self.records_per_batch = self.max_records_per_batch
            self.batches = choices.records // self.records_per_batch
        rng = random.Random(f"kills-{choices.seed}")
        self.services = [self._service(link, rng) for link in self.links]
        self._generator = Generator(bootstrap_servers, self.topics, self.inputs())
        self._tallies: dict[frozenset[str], Tally] = {}

    def _service(self, link: Link, rng: random.Random) -> Service:
        kills = self.plan(rng, link)
        flow = link.flow + self.suffix
        if not link.keeps_state:
            return Service(flow, self.command(link), kills, self.folder)
        return Service(flow, self.command(link), plan_losses(kills, rng=rng), self.folder, state=self.state_dir / flow)

    # ---- what a demo adds ----------------------------------------------------------------------------

    @abc.abstractmethod
    def inputs(self) -> Iterator[Input]:
        """The records that are produced, in order, from the seed. May be asked for more than once."""

    @abc.abstractmethod
    def expected(self) -> Mapping[str, Iterable[Expected]]:
        """What topics of ``partitions`` must hold, in the order in which they are shown; see ``origins``. A demo that
        writes elsewhere has a name for that place, too, and its own ``compare``."""

    @abc.abstractmethod
    def identify(self, topic: str, message: Message) -> str | None:
        """The identity of a record that was found in a topic (its name without the suffix); None: it has none."""

    def command(self, link: Link) -> list[str]:
        """How the process of a flow is started."""
        command = [sys.executable, str(link.script), *link.arguments]
        command += ["--bootstrap-servers", self.servers, f"--suffix={self.suffix}"]
        command += ["--batch", str(self.records_per_batch)]
        return [*command, "--state-dir", str(self.state_dir)] if link.keeps_state else command

    def plan(self, rng: random.Random, link: Link) -> list[Kill]:
        """The kills of one flow. Asked once for each of ``links``, in order, with the same ``rng``."""
        return plan_kills(self.choices.kills, batches=int(self.batches * link.share), rng=rng)

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """What else must be there while the flows run."""
        return contextlib.nullcontext()

    def through(self, display: Display) -> bool:
        """Whether all outputs are written. Asked once a second after every flow has read its sources to their ends."""
        return True

    def judge(self, name: str, finding: Findings) -> list[str]:
        """What is wrong with a topic, one line each."""
        return finding.examples

    def look_further(self, audit: Audit, display: Display) -> None:
        """Audit everything else, after the topics of expected records."""
        return

    def more_topics(self) -> list[str]:
        """Topics that the flows made."""
        return []

    # ---- for demos -----------------------------------------------------------------------------------

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where the broker put those of the inputs that have an identity."""
        return self._generator.origins

    def counted(self, **at_least: int) -> bool:
        """Whether topics (names without suffix) hold so many committed records, or have got none for a long time: then
        the audit will say what is missing."""
        tally = self._tallies.get(frozenset(at_least))
        if tally is None:
            places = {self.topics[name]: self.partitions[name] for name in at_least}
            tally = self._tallies[frozenset(at_least)] = Tally(self.servers, places)
        counts = tally.look(self.deadline)
        return tally.quiet_s > _SETTLED_S or all(counts[self.topics[name]] >= n for name, n in at_least.items())

    # ---- the run -------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run the demo and return its verdict, as it is printed."""
        totals = {"produced": self.choices.records, **{link.done: self.choices.records for link in self.links}}
        totals["kills"] = len(self.links) * self.choices.kills
        with Display(totals) as display, self.surroundings():
            display.say(f"seed {self.choices.seed}, brokers {self.servers}")
            for name, topic in self.topics.items():
                create_topic(self.servers, topic, self.partitions[name], self.configs.get(name))
            self._generator.start()
            try:
                self.process(display)
            finally:
                self._generator.leave.set()
                self._generator.join(10.0)
                for tally in self._tallies.values():
                    tally.close()
            display.say("all records are processed; reading all topics")
            audit = self.audit(display)
        return self.report(audit)

    def process(self, display: Display) -> None:
        """Run all services, with their kills, until nothing is left to read."""
        self.run_together(range(len(self.links)), display)

    def await_source(self, display: Display) -> None:
        """All records are in their topics: for a demo whose flows all find the same there."""
        while not self._generator.check():
            if self.deadline.expired:
                raise self.deadline.error(f"{self._generator.delivered} records are produced")
            display.count(produced=self._generator.delivered)
            self._generator.join(_LOOK_EVERY_S / 10)
        display.count(produced=self._generator.delivered)

    def run_together(self, which: Iterable[int], display: Display) -> None:
        """Some of the services run, and die, until nothing is left for them to read; then they are stopped."""
        services, links = zip(*((self.services[n], self.links[n]) for n in which), strict=True)
        with contextlib.ExitStack() as stack:
            lags = []
            for service, link in zip(services, links, strict=True):
                sources = {self.topics[name]: self.partitions[name] for name in link.sources}
                lag = GroupLag(self.servers, service.flow, sources)
                stack.callback(lag.close)
                lags.append(lag)
            supervisor = stack.enter_context(Supervisor(services))
            looked_at = 0.0

            def all_read() -> bool:
                nonlocal looked_at
                self._report_deaths(display)
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

            def stop(some: Sequence[Service]) -> None:
                display.say(f"stopping {', '.join(service.flow for service in some)}")
                supervisor.stop(some)

            # The end of what these write moves until they have stopped, although they have read everything.
            early = [service for service, link in zip(services, links, strict=True) if link.at_most_once]
            if early:
                supervisor.run(all_read, self.deadline)
                stop(early)
            supervisor.run(lambda: all_read() and self.through(display), self.deadline)
            display.count(kills=self.kills)
            stop([service for service in services if service not in early])

    @property
    def kills(self) -> int:
        """How many have happened."""
        return sum(len(service.deaths) for service in self.services)

    def _report_deaths(self, display: Display) -> None:
        for service in self.services:
            for death in service.deaths[sum(d.reported for d in service.deaths) :]:
                death.reported = True
                lost = ", local state deleted" if death.lost_state else ""
                place = f"batch {death.batch} committed" if death.in_batch is None else f"in batch {death.in_batch}"
                display.say(f"{service.flow}: SIGKILL after step {death.step} ({place}){lost}")

    def audit(self, display: Display) -> Audit:
        """Read everything with an independent consumer, and compare."""
        audit = Audit()
        for name, records in self.expected().items():
            finding = self.compare(name, records)
            audit.topics.append(finding)
            audit.problems += self.judge(name, finding)
            display.say(f"{finding.topic}: {finding.found:,} records read, {finding.expected:,} expected")
            if name in self.topics and name not in self.inputs_of:
                everything = read_topic(self.servers, finding.topic, self.deadline, isolation="read_uncommitted")
                audit.hidden[finding.topic] = sum(1 for _ in everything) - finding.found
        self.look_further(audit, display)
        missed = sum(service.planned - len(service.deaths) for service in self.services)
        if missed:
            audit.problems.append(f"{missed} of the planned kills did not happen")
        return audit

    def compare(self, name: str, records: Iterable[Expected], found: Iterable[Message] | None = None) -> Findings:
        """Hold a topic (its name without suffix) against what it must hold.

        Args:
            found: what counts of its records; None: all of them, read now.
        """
        topic = self.topics[name]
        return compare(
            topic,
            records,
            read_topic(self.servers, topic, self.deadline) if found is None else found,
            partitions=self.partitions[name],
            identify=lambda message: self.identify(name, message),
        )

    def report(self, audit: Audit) -> dict[str, Any]:
        """Print what was found; the last line."""
        tables = [topics_table(audit.topics, audit.hidden), *audit.tables, services_table(self.services)]
        print_result(tables, audit.problems)
        counts = [sum(column) for column in zip(*(finding.counts.values() for finding in audit.topics), strict=True)]
        lost, duplicated, *others = counts
        return {
            "demo": self.name,
            "in": self._generator.delivered,
            "out": audit.found(self.topics[name] for name in self.outputs),
            "dead_letters": audit.found(self.topics[name] for name in self.dead_letters),
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
    least = kind.min_records_per_batch * BATCHES_PER_LIFE * (choices.kills + 1)
    if choices.records < least:
        raise OptionError(
            f"{choices.records} records are too few for {choices.kills} kills per flow",
            next_step=f"use at least --records {least}, or fewer --kills",
        )
    deadline = Deadline(choices.timeout_s, f"the demo {kind.name}")
    with workplace(choices.bootstrap_servers) as place:
        chain = kind(choices, place.servers, place.folder, deadline)
        result = chain.run()
        place.end(result, [*chain.topics.values(), *chain.more_topics()])
        return result
