"""``onceflow compare``: what a flow and its copy have written since the copy was made."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onceflow.cli.check import Check, verdict
from onceflow.cli.connection import connection, pairs
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.report_text import print_report
from onceflow.cli.text import Number

if TYPE_CHECKING:
    from onceflow.admin.verify.report import Report
    from onceflow.client.settings import ClientSettings


@examples(
    "onceflow compare balances balances-v2",
    "onceflow compare balances balances-v2 --output balances-out=balances-v2-out --id '$.id' --json",
)
@click.command(cls=Check)
@click.argument("flow")
@click.argument("new")
@connection
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="OLD=NEW",
    help="An output of FLOW, and that of NEW.  [default: as both have written lately, if each has one]",
)
@click.option("--id", "identity", metavar="PLACE", help="Compare by source records: $.field, key or header:NAME.")
@click.option("--ignore", "ignored", multiple=True, metavar="$.FIELD", help="A field of JSON values that may differ.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="OLD=NEW",
    help="A table and its copy.  [default: as the fork made them]",
)
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="Without --id: how long to wait until both are at the same position.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Differences of a kind to show."
)
@click.option(
    "--scratch", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Folder for scratch files."
)
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`, of both flows.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each difference, and a last one with the sums."
)
def compare(
    flow: str,
    new: str,
    settings: ClientSettings,
    outputs: tuple[str, ...],
    identity: str | None,
    ignored: tuple[str, ...],
    tables: tuple[str, ...],
    wait_s: float,
    limit: int,
    scratch: Path | None,
    transactional_id_prefix: str,
    as_json: bool,
) -> int:
    """Compare what FLOW and its copy NEW have written since `onceflow fork`, and their tables.

    It reads committed records only, and fences nobody. With --id, both may run: only outputs of source records are
    compared that both have read. Without it, both have to be at the same position.

    Exit codes: 0 nothing differs; 1 something differs; 2 not compared: there is nothing to compare yet, an error, or
    wrong usage; 130 interrupted.
    """
    from onceflow.admin.verify.identity import identity_of
    from onceflow.admin.verify.tally import RecordComparison
    from onceflow.admin.versions.comparison import Compared, Comparison
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import Names

    if identity == "record":
        raise click.UsageError("--id record: without --id, records are compared as a whole")
    compared = Compared(
        pairs(outputs, "--output"),
        pairs(tables, "--table"),
        None if identity is None else identity_of(identity),
        wait_s,
        ignored,
    )
    names, other = (Names(each, transactional_id_prefix) for each in (flow, new))
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contextlib.closing(Cluster(settings)))
        check = stack.enter_context(interruptible())
        show = stack.enter_context(progress_bar())

        def tell(text: str, done: int, total: int | None) -> None:
            check()
            show(text, done, total)

        comparison = Comparison(
            cluster, names, other, compared, scratch=lambda: RecordComparison(scratch), limit=limit, tell=tell
        )
        report = comparison.run()
    _print(flow, new, report, as_json)
    return verdict(report)


def _print(flow: str, new: str, report: Report, as_json: bool) -> None:
    sums = ", ".join(f"{count:,} of {kind}" for kind, count in report.counts.items())
    equal = "not known whether they are equal" if report.not_checked else "nothing differs"
    text = f"{flow} and {new}: " + (f"differences: {sums}" if sums else equal)
    head = {"flow": flow, "new": new, "equal": report.exact}
    print_report(report, head, done="compared", verdict=text, as_json=as_json)
