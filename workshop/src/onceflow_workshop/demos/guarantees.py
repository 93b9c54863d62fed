"""The demo ``guarantees``: one copy service, three guarantees, the same kills, and what each makes of them.

deposits -> [copy, at_most_once]  -> at_most_once     loses
         -> [copy, at_least_once] -> at_least_once    doubles
         -> [copy, exactly_once]  -> exactly_once     neither

They run one after the other, so that none takes the processor from another. All find the same records and make
the same batches, and their drivers are killed after the same steps of the same batches.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from onceflow.planning.options import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE
from onceflow_workshop.demos.audit import Expected, Findings, Message
from onceflow_workshop.demos.chain import Audit, Chain, Choices, Link, run_chain
from onceflow_workshop.demos.display import Display, print_result
from onceflow_workshop.demos.generator import Input
from onceflow_workshop.demos.harness import Kill

SOURCE = "deposits"
COPY_SERVICE = Path(__file__).with_name("copy_service.py")
_ID = re.compile(rb"dep-\d{9}")
#: In the order in which they are run and shown.
GUARANTEES = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)
#: The one kind of damage that a guarantee allows, and the step that a kill has to follow to cause it: with at_most_once
#: progress has moved and no row is written; with at_least_once all rows are acknowledged and progress has not moved.
ALLOWED: Mapping[str, tuple[str, str]] = {AT_MOST_ONCE: ("lost", "progress"), AT_LEAST_ONCE: ("duplicated", "write")}
#: What there must be a kill after, so that it does not depend on luck what is seen; and what else there may be. After
#: `begin` and `end` a kill costs nobody anything: ``judge`` counts on it.
STEPS_ALWAYS = ("write", "progress")
STEPS_MORE = (*STEPS_ALWAYS, "begin", "end")


@dataclass(frozen=True)
class Outcome:
    """What one guarantee came to, as it is shown.

    Args:
        aborted: records of aborted transactions in its topic.
        rows_per_s: rows of all batches over the seconds that their steps took.
    """

    guarantee: str
    out: int
    lost: int
    duplicated: int
    kills: int
    rows_per_s: int
    aborted: int


class Guarantees(Chain):
    """Copy deposits with each guarantee."""

    name = "guarantees"
    partitions: ClassVar[Mapping[str, int]] = {SOURCE: 4, **dict.fromkeys(GUARANTEES, 3)}
    links: ClassVar[Sequence[Link]] = tuple(
        Link(f"copy-{guarantee}", (SOURCE,), guarantee, COPY_SERVICE, (guarantee,)) for guarantee in GUARANTEES
    )
    inputs_of = (SOURCE,)
    outputs = GUARANTEES

    def inputs(self) -> Iterator[Input]:
        """Keyed by their ids: no key is there twice."""
        rng = random.Random(f"guarantees-{self.choices.seed}")
        for number in range(self.choices.records):
            identity = f"dep-{number:09d}".encode()
            yield Input(SOURCE, identity, b'{"id": "%s", "amount": %d}' % (identity, rng.randint(1, 1_000_000)))

    def expected(self) -> Mapping[str, Iterable[Expected]]:
        return {name: self._copies() for name in self.partitions}

    def _copies(self) -> Iterator[Expected]:
        return (Expected((record.key or b"").decode(), record.key, record.value) for record in self.inputs())

    def identify(self, topic: str, message: Message) -> str | None:
        found = _ID.search(message.value or b"")
        return None if found is None else found[0].decode()

    def plan(self, rng: random.Random, link: Link) -> list[Kill]:
        return self.points()

    def points(self) -> list[Kill]:
        """The kills of each flow, the same for all: chosen by the seed alone."""
        return plan_points(self.choices.kills, batches=self.batches, seed=self.choices.seed)

    def process(self, display: Display) -> None:
        """One after the other, over the same records: these are all there before the first starts."""
        self.await_source(display)
        for number, guarantee in enumerate(GUARANTEES):
            display.say(f"copying with {guarantee}")
            self.run_together([number], display)

    def judge(self, name: str, finding: Findings) -> list[str]:
        # A batch may exceed its bound by less than a record per source partition: Spark rounds shares of below one up.
        batch = self.records_per_batch + self.partitions[SOURCE]
        return judge(name, finding, self.points(), batch)

    def outcomes(self, audit: Audit) -> list[Outcome]:
        """Per guarantee, in their order."""
        findings = [finding for finding in audit.topics if finding.topic != self.topics[SOURCE]]
        return [
            Outcome(
                guarantee,
                out=finding.found,
                lost=finding.counts["lost"],
                duplicated=finding.counts["duplicated"],
                kills=len(service.deaths),
                rows_per_s=round(service.records / service.seconds) if service.seconds else 0,
                aborted=audit.hidden[finding.topic],
            )
            for guarantee, finding, service in zip(GUARANTEES, findings, self.services, strict=True)
        ]

    def report(self, audit: Audit) -> dict[str, Any]:
        count, outcomes = audit.topics[0].found, self.outcomes(audit)
        print_result([guarantees_table(count, outcomes)], [*legend(self.points()), *audit.problems])
        return {
            "demo": self.name,
            "in": count,
            "guarantees": facts(outcomes),
            **self.ending(failed=bool(audit.problems)),
        }


def plan_points(count: int, *, batches: int, seed: int) -> list[Kill]:
    """At least two kills: after every step of ``STEPS_ALWAYS`` and some others, spread over the batches.

    No two are in one batch, and none in the last one: every kill happens, whatever the one before it has lost.
    """
    rng = random.Random(f"points-{seed}")
    steps = [*STEPS_ALWAYS, *rng.choices(STEPS_MORE, k=count - len(STEPS_ALWAYS))]
    rng.shuffle(steps)
    apart = (batches - 1) // count
    return [Kill(step, in_batch=apart * n + rng.randint(1, apart)) for n, step in enumerate(steps)]


def judge(guarantee: str, finding: Findings, kills: Sequence[Kill], records_per_batch: int) -> list[str]:
    """What speaks against a topic's having been written with this guarantee, one line each; none: it was.

    The damage that the guarantee allows must be there, and not be more than the kills explain. No other may.

    Args:
        guarantee: one of ``GUARANTEES``; any other topic allows nothing.
        kills: that have been planned.
        records_per_batch: at most.
    """
    kind, step = ALLOWED.get(guarantee, ("", ""))
    count = finding.counts.get(kind, 0)
    explained = records_per_batch * sum(kill.step == step for kill in kills)
    problems = [] if count <= explained else [f"{guarantee}: {count:,} {kind}, kills explain {explained:,} at most"]
    if kind and not count:
        problems.append(f"{guarantee}: none {kind}, although it was killed after step {step}")
    others = {name: number for name, number in finding.counts.items() if number and name != kind}
    problems += [f"{guarantee}: {number:,} {name}" for name, number in others.items()]
    return problems + [example for example in finding.examples if any(f": {name}: " in example for name in others)]


def facts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """For the last line."""
    names = ("out", "lost", "duplicated", "kills", "rows_per_s")
    return {outcome.guarantee: {name: getattr(outcome, name) for name in names} for outcome in outcomes}


def guarantees_table(count: int, outcomes: Sequence[Outcome]) -> Table:
    """One row per guarantee. ``count``: records in the source."""
    table = Table(title="One service, three guarantees, as a read_committed consumer sees what came out")
    table.add_column("guarantee")
    for name in ("in", "out", "lost", "duplicated", "aborted", "kills", "rows/s"):
        table.add_column(name, justify="right")
    for row in outcomes:
        numbers = (count, row.out, row.lost, row.duplicated, row.aborted, row.kills, row.rows_per_s)
        table.add_row(row.guarantee, *(f"{number:,}" for number in numbers))
    return table


def legend(kills: Sequence[Kill]) -> list[str]:
    """What the table means, one line each."""
    points = ", ".join(f"{kill.step} of batch {kill.in_batch}" for kill in kills)
    return [
        f"kills: each driver got SIGKILL right after step {points}",
        "aborted: written in transactions of killed drivers, shown to nobody",
        "rows/s: rows of the batches over the seconds that their steps took, plan to end, as the service measured;",
        "        without starts and Spark's work between batches, with the slow first batch of each start;",
        "        the JVMs use their quick compiler only: compare the three, not with a service that runs for long",
    ]


def run(choices: Choices) -> dict[str, Any]:
    """Run the demo; see ``run_chain``."""
    return run_chain(Guarantees, choices)
