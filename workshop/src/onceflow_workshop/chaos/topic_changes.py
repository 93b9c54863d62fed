"""The fault kinds in which an operator changes topics of a flow: ``onceflow parked replay`` and ``table repartition``.

The commands may be killed at a step, and are run again then. Flows go on meanwhile, or are fenced by the command.
"""

from __future__ import annotations

import random

from onceflow.testing import independent
from onceflow.testing.faults import fault
from onceflow_workshop.chaos.commands import Commands
from onceflow_workshop.chaos.flows import LEDGER, SORTER, Names
from onceflow_workshop.chaos.replacing import replaceable
from onceflow_workshop.chaos.test_bed import Setup, TestBed

_REPLAY_STEPS = ("init", "write", "commit", "end")
_STEPS = ("init", "write", "progress", "end")
_MOST_PARTITIONS = 12


def has_letters(setup: Setup) -> bool:
    """Whether there are dead letters to replay: not where transaction markers get lost, because a topic cannot be read
    to its end then."""
    return SORTER in setup.flows and setup.copies is None


def replay(commands: Commands, names: Names, rule: str | None = None) -> None:
    """Send all dead letters that have not been replayed yet to the topic of replayed records.

    Args:
        rule: a fault for the command; it is run again afterwards.
    """
    arguments = ["parked", "replay", names.dead, "--all", "--to", names.replayed]
    commands.until_done(arguments, flow=names.flow(SORTER), rule=rule)


def letters_replayed(bed: TestBed, rng: random.Random) -> str:
    """Replay dead letters while the flow writes others."""
    step = rng.choice((None, *_REPLAY_STEPS))
    rule = None if step is None else fault(step, "kill", flow=f"parked.{bed.names.dead}")
    replay(bed.commands, bed.names, rule)
    return f"dead letters of {bed.names.flow(SORTER)} replayed" + bed.commands.told(step)


def growing(setup: Setup) -> list[str]:
    """The flows whose tables may get more partitions: nobody else reads them. (The joiner's has to have as many as the
    ledger's.)"""
    return [kind for kind in replaceable(setup) if kind in (LEDGER, SORTER)]


def table_repartitioned(bed: TestBed, rng: random.Random) -> str:
    """Give a table more partitions. The driver is killed before, or is fenced by the command.

    It may be started between two tries: then it refuses to run until the rows have moved.
    """
    kind = rng.choice(growing(bed.setup))
    flow, table = bed.names.flow(kind), bed.names.own_table(kind) or ""
    before = len(independent.end_offsets(bed.bootstrap_servers, table))
    partitions = min(before + rng.randint(1, 2), _MOST_PARTITIONS)
    if rng.random() < 0.5:
        bed.driver.kill()
    is_started = rng.random() < 0.5

    def between(said: str) -> None:
        nonlocal is_started
        if is_started:
            bed.driver.revive()
        is_started = False

    step = rng.choice((None, *_STEPS))
    bed.commands.until_done(
        ["table", "repartition", flow, table, "--partitions", str(partitions), "--yes"],
        flow=flow,
        rule=None if step is None else fault(step, "kill", flow=flow),
        between=between,
    )
    return f"{table} got {partitions} partitions instead of {before}" + bed.commands.told(step)
