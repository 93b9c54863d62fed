"""``onceflow promote``: a new version takes the place of the running one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.moving import Options, Texts, carry_out, moving_options
from onceflow.cli.text import Number, in_columns
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.versions.promote import Promoted
    from onceflow.client.settings import ClientSettings


@examples(
    "onceflow promote balances-v2 --replaces balances --dry-run",
    "onceflow promote balances-v2 --replaces balances --yes",
)
@click.command()
@click.argument("new")
@connection
@click.option("--replaces", "flow", required=True, metavar="FLOW", help="The flow whose place NEW takes.")
@click.option(
    "--max-gap",
    type=click.IntRange(min=0),
    default=100_000,
    show_default=True,
    help="How many records NEW may be behind.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long FLOW may take to get as far as NEW.",
)
@click.option("--new-timers", is_flag=True, help="FLOW has no timers; those of NEW that have fired are left out.")
@click.option(
    "--same-timers",
    is_flag=True,
    help="Timers in processing time have the same times in both flows, because these follow from records alone.",
)
@click.option(
    "--new-topics",
    is_flag=True,
    help="FLOW does not read some topics of NEW; the outputs of what NEW has read of them are left out.",
)
@moving_options(
    dry_run="Only show what would be done. No driver is fenced.", prefixes="The same as in `Flow(...)`, of both flows."
)
def promote(
    new: str,
    settings: ClientSettings,
    flow: str,
    max_gap: int,
    wait_s: float,
    new_timers: bool,
    same_timers: bool,
    new_topics: bool,
    options: Options,
) -> None:
    """Let NEW take the place of FLOW: its name, its group and its outputs, with the tables of NEW.

    Stop whatever restarts NEW before. FLOW runs until it has read as much as NEW; then both are fenced, and one
    transaction decides. Then start the program of NEW as FLOW, with FLOW's outputs and with NEW's tables. The outputs
    of FLOW go on as if one program had written them: no record is missing or doubled.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.admin.versions import promote as promoter

    names, other = options.names(flow), options.names(new)
    limits = promoter.Limits(max_gap, wait_s, new_timers, same_timers, new_topics)
    carry_out(
        settings,
        options,
        Texts(_plan, _question, _done, _content),
        lambda cluster: promoter.preview(cluster, names, other, limits),
        lambda cluster, tell: promoter.promote(cluster, names, other, limits, tell),
    )


def _plan(planned: Promoted) -> list[str]:
    rows = [
        [f"{each.topic}-{each.partition}", "-" if each.old is None else each.old, each.new]
        for each in planned.positions
    ]
    lines = in_columns(["PARTITION", planned.flow, planned.new], rows)
    if not planned.stateful:
        return [*lines, f"{planned.new} has no state: it continues where {planned.flow} is."]
    ahead = (
        f"{planned.new} is ahead: {planned.flow} has at most {counted(planned.ahead, 'record')} to go, and has to run "
        "until it has read them (see --wait)."
    )
    behind = (
        f"{planned.new} is at most {counted(planned.gap, 'record')} behind. Its first batches as {planned.flow} "
        "process these without writing outputs."
    )
    positions = [ahead] if planned.ahead else []
    positions += [behind] if planned.gap else []
    return [*lines, *(positions or [f"{planned.new} is as far as {planned.flow}."]), *_warnings(planned)]


def _warnings(planned: Promoted) -> list[str]:
    """What the operator may not expect of the copy."""
    copy = planned.copy
    if copy is None or copy.forked is None:
        return []
    lines = []
    if copy.batch_id == 0:
        lines.append(f"{planned.new} has committed no batch since it was copied: its program is untried.")
    if empty := sorted(set(copy.tables) - set(copy.forked.tables.values())):
        lines.append(
            f"Warning: these tables of {planned.new} are not copies of tables of {planned.flow}, and have only what "
            f"{planned.new} has put there: {', '.join(empty)}."
        )
    return lines


def _question(planned: Promoted) -> str:
    return f"Stop running drivers of both flows, and let {planned.new!r} take the place of {planned.flow!r}?"


def _replaced(found: Promoted) -> dict[str, str]:
    """By table of the flow, what has replaced it."""
    progress = found.progress
    return {} if progress is None or progress.promoted is None else dict(progress.promoted.tables)


def _done(found: Promoted) -> list[str]:
    if found.already:
        return [f"{found.new} has taken the place of {found.flow} already."]
    names = ", ".join(sorted(found.progress.tables)) if found.progress else ""
    tables = ", ".join(sorted(_replaced(found)))
    return [
        f"{found.new} has taken the place of {found.flow} behind batch {found.before.batch_id}.",
        f"Start its program as flow {found.flow}" + (f", with the tables {names}." if names else "."),
        *([f"No flow uses these tables any more: {tables}."] if tables else []),
    ]


def _content(found: Promoted) -> dict[str, Any]:
    return {
        "flow": found.flow,
        "new": found.new,
        "dry_run": found.progress is None,
        "already": found.already,
        "batch": found.before.batch_id,
        "gap_max": found.gap,
        "ahead_max": found.ahead,
        "tables": _replaced(found),
        "positions": [
            {"topic": each.topic, "partition": each.partition, "flow": each.old, "new": each.new}
            for each in found.positions
        ],
    }
