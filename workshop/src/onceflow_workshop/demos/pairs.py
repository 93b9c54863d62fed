"""The demo ``pairs``: A and B events of one timestamp are brought together, by three versions of one service.

events -> [pairs] -> pairs, unpaired, late, dead-letters                      Processor, timers, a table topic
events -> [sort] -> as, bs, dead-letters-sort                                 no state
          as, bs -> [join] -> pairs-join, unpaired-join                       Spark's full outer join
          as, bs -> [grouped] -> pairs-grouped, unpaired-grouped              Spark's aggregation

They run one after the other over the same events, and must come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rich.table import Table

from onceflow_workshop.demos import pairs_data as data
from onceflow_workshop.demos.audit import Expected, Message, onceflow_headers, origin_headers
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.pairs_bad_records import NOT_JSON, TWICE, Bad
from onceflow_workshop.demos.pairs_events import Moment
from onceflow_workshop.demos.reading import read_topic
from onceflow_workshop.demos.service_files import service_file

SERVICE = service_file("pairs/pairs.py")
#: The same with Spark's own state.
SPARK_SERVICE = service_file("pairs/pairs_spark.py")
PROCESSOR, SORT, JOIN, GROUPED = "processor", "sort", "join", "grouped"
#: In the order in which they run.
VERSIONS = (PROCESSOR, JOIN, GROUPED)
LINKS = {
    PROCESSOR: Link("pairs", ("events",), PROCESSOR, SERVICE, keeps_state=True),
    SORT: Link("pairs-sort", ("events",), SORT, SPARK_SERVICE, (SORT,)),
    # Each of two topics has a bit less than half of the events.
    JOIN: Link("pairs-join", ("as", "bs"), JOIN, SPARK_SERVICE, (JOIN,), share=0.9),
    GROUPED: Link("pairs-grouped", ("as", "bs"), GROUPED, SPARK_SERVICE, (GROUPED,), share=0.9),
}
#: How many rows of state a moment may take: its events and their two timers; two halves of a join and two ids, which
#: Spark remembers for five minutes longer than the halves; one row of an aggregation.
ROWS_OF_A_MOMENT = {PROCESSOR: 3, JOIN: 6, GROUPED: 1}
#: What `sort` says of what it does not tell apart.
SORTED_AS = {TWICE: NOT_JSON}
#: Records keep the timestamps of the demo's own time, long ago: a broker would delete them for their age.
KEPT = {"retention.ms": "-1"}


@dataclass(frozen=True)
class PairsChoices(Choices):
    """Options of the command.

    Args:
        partitions: of the events and of the state. versions: one of ``VERSIONS``, or all.
    """

    partitions: int = 4
    versions: str = "all"


class Pairs(Chain):
    """Some versions over one topic of events; see ``chosen``."""

    name = "pairs"
    inputs_of = ("events",)
    max_records_per_batch = 12_000  # what the state holds is some minutes, and up to three batches
    configs: ClassVar[Mapping[str, Mapping[str, str]]] = dict.fromkeys(
        ("events", "late", "dead-letters", "as", "bs", "dead-letters-sort"), KEPT
    )
    versions: ClassVar[tuple[str, ...]]
    running = SORT

    # ---- what there is -------------------------------------------------------------------------------

    def story(self) -> Iterator[Moment | Bad]:
        return data.story(self.choices.seed, self.choices.records, self.partitions["events"])

    @cached_property
    def bad(self) -> dict[str, Bad]:
        return data.bad_records(self.story())

    def inputs(self) -> Iterator[Input]:
        for each in data.arrivals(self.choices.seed, self.choices.records, self.partitions["events"]):
            yield Input("events", each.key, each.value, each.bad, partition=each.partition, timestamp_ms=each.at_ms)

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        topics: dict[str, Iterable[Expected]] = {}
        for version in self.versions:
            pairs, unpaired = outputs_of(version)
            topics |= {pairs: data.expected_pairs(self.story()), unpaired: data.expected_unpaired(self.story())}
        if "late" in self.partitions:
            topics["late"] = ()
        for name in self.dead_letters:
            topics[name] = self.expected_dead_letters(name)
        return topics

    def expected_dead_letters(self, topic: str) -> Iterator[Expected]:
        """Bad records as they were. For a processor the timestamp is the key, and the key of its dead letters."""
        for bad in self.bad.values():
            of_state = "none" if bad.timestamp is None else bad.timestamp
            key = bad.id if topic == "dead-letters-sort" else of_state
            yield Expected(bad.id, key.encode(), bad.value, headers=None, free=True)

    def identify(self, topic: str, message: Message) -> str | None:
        if topic not in self.dead_letters:
            return data.identify(message)
        headers = onceflow_headers(message)
        return self.bad_at.get((headers.get("onceflow.origin.partition"), headers.get("onceflow.origin.offset")))

    @cached_property
    def bad_at(self) -> dict[tuple[str | None, str | None], str]:
        """Ids of the bad records by where the broker put them: their values may not say it."""
        return {(str(origin.partition), str(origin.offset)): name for name, origin in self.origins.items()}

    def more_topics(self) -> list[str]:
        table = f"waiting{self.suffix}"
        return [table, f"{table}-internal"] if PROCESSOR in self.versions else []

    # ---- the run -------------------------------------------------------------------------------------

    def command(self, link: Link) -> list[str]:
        kept = ["--checkpoint", str(self.folder / f"checkpoint-{link.done}")] if link.done in (JOIN, GROUPED) else []
        return [*super().command(link), *kept]

    def process(self, display: Display) -> None:
        """One after the other, over the same records: these are all there before the first starts.

        Spark's watermark follows the partition that is farthest ahead, so it must find all equally full.
        """
        self.await_source(display)
        for number, link in enumerate(self.links):
            self.running = link.done
            display.say(f"version {link.done}" if link.done in VERSIONS else "sorting events for Spark's versions")
            self.run_together([number], display)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """How many pairs and unpaired events there must be."""
        return sum(1 for _ in data.expected_pairs(self.story())), sum(1 for _ in data.expected_unpaired(self.story()))

    def through(self, display: Display) -> bool:
        # The last ones come out when event time is past them, without further input.
        if self.running not in VERSIONS:
            return True
        return self.counted(**dict(zip(outputs_of(self.running), self.counts, strict=True)))

    # ---- the audit -----------------------------------------------------------------------------------

    def look_further(self, audit: Audit, display: Display) -> None:
        for name in self.dead_letters:
            audit.problems += self.wrong_causes(name)[:5]
        peaks = {version: self.peak(version, audit) for version in self.versions}
        bound = data.max_moments(
            self.choices.seed,
            self.choices.records,
            self.partitions["events"],
            records_per_batch=self.records_per_batch,
        )
        for version, peak in peaks.items():
            if not 0 < peak <= bound * ROWS_OF_A_MOMENT[version]:
                most = bound * ROWS_OF_A_MOMENT[version]
                audit.problems.append(f"{version}: {peak:,} rows of state; there should be some, and at most {most:,}")
        audit.tables.append(state_table(peaks, sum(self.counts), bound))
        audit.facts |= {"unpaired": self.counts[1], "late": self.found("late", audit), "state_rows_peak": peaks}

    def found(self, name: str, audit: Audit) -> int:
        return audit.found([self.topics[name]]) if name in self.topics else 0

    def wrong_causes(self, topic: str) -> list[str]:
        """Letters whose headers do not say what is wrong and where it was read, one line each."""
        problems = []
        for message in read_topic(self.servers, self.topics[topic], self.deadline):
            headers, name = onceflow_headers(message), self.identify(topic, message)
            if name is None:
                continue  # unexpected, as has been said
            wanted = expected_cause(self.bad[name], of_processor=topic == "dead-letters")
            wanted |= {"onceflow.attempt": "1", **origin_headers(self.origins[name])}
            differences = [f"{key} is {headers.get(key)!r}" for key, text in wanted.items() if headers.get(key) != text]
            problems += [f"{topic}: {name}: {', '.join(differences)}"] if differences else []
        return problems

    def peak(self, version: str, audit: Audit) -> int:
        """Rows of state when there were most: replayed from the table topics, or as Spark says of its own."""
        if version != PROCESSOR:
            service = next(s for s, link in zip(self.services, self.links, strict=True) if link.done == version)
            return max((int(line.get("state_rows", 0)) for line in service.reports), default=0)
        peak = 0
        closing = 2 * self.partitions["events"]
        # Each of them is alone: a row of the table, and two timers.
        for topic, left in zip(self.more_topics(), (closing, 2 * closing), strict=True):
            rows = data.live_rows(read_topic(self.servers, topic, self.deadline))
            peak += rows.peak
            if rows.last != left:
                audit.problems.append(f"{topic}: {rows.last:,} rows are left, there must be {left}: of closing events")
        return peak


def outputs_of(version: str) -> tuple[str, str]:
    """Topics of pairs and of unpaired events."""
    return ("pairs", "unpaired") if version == PROCESSOR else (f"pairs-{version}", f"unpaired-{version}")


def expected_cause(bad: Bad, *, of_processor: bool) -> dict[str, str]:
    """What the headers of a dead letter must say is wrong. The processor's own errors have their own words."""
    if of_processor and bad.cause == NOT_JSON:
        return {"onceflow.error.class": "JSONDecodeError"}
    # What the two find when they look at it in their own way.
    other = {TWICE: "the key is not its timestamp"} if of_processor else SORTED_AS
    return {"onceflow.error.class": "BadEvent", "onceflow.error.message": other.get(bad.cause, bad.cause)}


def state_table(peaks: Mapping[str, int], moments: int, bound: int) -> Table:
    """One row per version."""
    table = Table(title="State: what is over is forgotten")
    table.add_column("version")
    for name in ("timestamps", "of these at a time, at most", "rows of state, at most"):
        table.add_column(name, justify="right")
    for version, peak in peaks.items():
        table.add_row(version, f"{moments:,}", f"{bound:,}", f"{peak:,}")
    return table


def chosen(partitions: int, versions: str) -> type[Pairs]:
    """The demo with these versions."""
    names = VERSIONS if versions == "all" else (versions,)
    topics = {"events": partitions}
    for version in names:
        pairs, unpaired = outputs_of(version)
        # Of other counts than the events: a record must be placed anew.
        topics |= {pairs: 3, unpaired: 2}
    steps = list(names)
    if PROCESSOR in names:
        topics |= {"late": 1, "dead-letters": 2}
    if names != (PROCESSOR,):
        topics |= dict.fromkeys(("as", "bs", "dead-letters-sort"), partitions)
        steps.insert(names.count(PROCESSOR), SORT)  # before those that read what it writes

    class Chosen(Pairs):
        partitions: ClassVar[Mapping[str, int]] = topics
        links: ClassVar[Sequence[Link]] = [LINKS[step] for step in steps]
        outputs = tuple(name for version in names for name in outputs_of(version))
        dead_letters = tuple(name for name in topics if name.startswith("dead-letters"))
        versions = names

    return Chosen


def run(choices: PairsChoices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(chosen(choices.partitions, choices.versions), choices)
