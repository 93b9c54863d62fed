"""The fault kind that replaces a flow by a copy of it. It comes twice: it forks the flow, and later promotes the copy.

The commands may be killed at a step, and are run again then, as an operator would do. Other faults come in between.
"""

from __future__ import annotations

import random

from onceflow.testing.faults import fault
from onceflow_workshop.chaos.flows import COPY, JOINER, LEDGER, PLAIN, SORTER
from onceflow_workshop.chaos.replacement import Replacement
from onceflow_workshop.chaos.test_bed import AHEAD_MS, Setup, TestBed
from onceflow_workshop.testing.network import CUT, DIRECTIONS, Network, Rule

_STEPS = ("init", "write", "progress", "end")


def replaceable(setup: Setup) -> list[str]:
    """The flows that a copy may replace: their state is in Kafka only, and nobody else reads their tables."""
    if setup.copies is not None:  # a table with lost markers cannot be read to its end
        return []
    is_read = setup.servers > 0 or JOINER in setup.flows
    return [
        kind
        for kind in (COPY, PLAIN, LEDGER, SORTER, JOINER)
        if kind in setup.flows and not (kind == LEDGER and is_read)
    ]


def flow_replaced(bed: TestBed, rng: random.Random) -> str:
    """Fork a flow. When the fault comes again, the copy takes the place of the flow."""
    return _forked(bed, rng) if bed.replacement is None else _promoted(bed, rng, bed.replacement)


def _forked(bed: TestBed, rng: random.Random) -> str:
    kind = rng.choice(replaceable(bed.setup))
    found = bed.replacement = Replacement(
        bed.names, kind, bed.proxies.bootstrap_servers, bed.engines, random.Random(rng.random())
    )
    found.create_topics(bed.bootstrap_servers, bed.setup.partitions)
    bed.copies.append((kind, found.copy))
    step = rng.choice((None, *_STEPS))
    found.fork(None if step is None else fault(step, "kill", flow=found.new), bed.driver.revive)
    return f"{found.flow} forked" + found.commands.told(step)


def _promoted(bed: TestBed, rng: random.Random, found: Replacement) -> str:
    if bed.names.clock.exists():  # timers that have fired in the copy must not have to wait for this clock
        bed.names.clock.write_text(str(AHEAD_MS))
    bed.driver.revive()
    found.await_commits()
    step = rng.choice((None, *_STEPS))
    around = rng.choice(("", "", ", its driver killed", ", connections cut"))
    if rng.random() < 0.5:
        found.driver.kill()  # otherwise the promotion fences it
    if "killed" in around:
        bed.driver.kill()
        bed.driver.start()
    faulty = Network(rng.randrange(2**32), [Rule(CUT, direction=way, probability=0.02) for way in DIRECTIONS])
    bed.proxies.faults(faulty if "cut" in around else None)

    def revive() -> None:
        bed.proxies.faults(None)
        bed.driver.revive()

    found.promote(None if step is None else fault(step, "kill", flow=found.flow), revive)
    bed.proxies.faults(None)
    bed.frames.update(faulty.counts)
    if rng.random() < 0.5:
        bed.driver.kill()  # otherwise it ends because it is fenced
        bed.driver.start()
    bed.end_copy()
    return f"{found.flow} replaced by its copy{around}" + found.commands.told(step)
