"""``onceflow verify``: an audit of a flow by an outsider."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from onceflow.admin.audit import Report
    from onceflow.client.settings import ClientSettings


@examples(
    "onceflow verify validated-deposits",
    "onceflow verify validated-deposits --id '$.id' --dead-letter rejected",
    "onceflow verify copy --id record --partitioner any --json",
)
@click.command()
@click.argument("flow")
@click.option("--id", "identity", metavar="PLACE", help="Compare records by $.field, key, header:NAME or record.")
@click.option(
    "--output", "outputs", multiple=True, metavar="TOPIC", help="An output.  [default: as progress names them]"
)
@click.option("--dead-letter", "letters", multiple=True, metavar="TOPIC", help="A topic of dead or late letters.")
@click.option("--in-each", is_flag=True, help="Each record is in every output, not in one of them.")
@click.option("--filtered", is_flag=True, help="The flow leaves out records: missing ones are not lost.")
@click.option(
    "--partitioner",
    type=click.Choice(["key", "any"]),
    default="key",
    show_default=True,
    help="key: records are where the Java client puts their keys.",
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Findings of a kind to show.")
@click.option(
    "--scratch", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Folder for scratch files."
)
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each finding, and a last one with the sums."
)
@connection
def verify(
    flow: str,
    identity: str | None,
    outputs: tuple[str, ...],
    letters: tuple[str, ...],
    in_each: bool,
    filtered: bool,
    partitioner: str,
    limit: int,
    scratch: Path | None,
    transactional_id_prefix: str,
    group_id_prefix: str,
    as_json: bool,
    settings: ClientSettings,
) -> int:
    """Check what FLOW has committed: its progress, its group, its tables, and with --id every record.

    It reads committed records only, fences nobody, and may be run while the flow runs. With --id, a source record below
    the committed position has to be in the outputs or letters exactly as often as in the source. Records without the id
    are compared as a whole. The exit code is 1 if something is lost, doubled, foreign, misplaced or inconsistent.
    """
    from onceflow.admin.audit import Audit, Outputs
    from onceflow.admin.identity import identity_of
    from onceflow.admin.tally import Tally
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import Names

    if identity is None and (outputs or letters or in_each or filtered):
        raise click.UsageError(
            "--output, --dead-letter, --in-each and --filtered need --id: records are compared by it"
        )
    names = Names(flow, transactional_id_prefix, group_id_prefix)
    wanted = Outputs(
        None if identity is None else identity_of(identity), outputs, letters, in_each, filtered, partitioner == "key"
    )
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contextlib.closing(Cluster(settings)))
        check = stack.enter_context(interruptible())
        show = stack.enter_context(progress_bar())

        def tell(text: str, done: int, total: int | None) -> None:
            check()
            show(text, done, total)

        report = Audit(cluster, names, wanted, limit=limit, tell=tell).run(stack.enter_context(Tally(scratch)))
    _print(flow, report, as_json)
    return 1 if report.counts else 0


def _print(flow: str, report: Report, as_json: bool) -> None:
    for each in report.examples:
        if as_json:
            click.echo(json.dumps(asdict(each)))
        else:
            places = ", ".join(f"{place.topic}-{place.partition}@{place.offset}" for place in each.places)
            click.echo(f"{each.kind}: {each.text}" + (f": {places}" if places else ""))
    if as_json:
        sums = {"flow": flow, "exact": not report.counts, "found": report.counts}
        click.echo(json.dumps({**sums, "checked": report.checked, "notes": report.notes}))
        return
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo("checked: " + ", ".join(f"{count:,} {name}" for name, count in report.checked.items()))
    sums_text = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.items())
    click.echo(f"{flow}: {sums_text or 'nothing wrong'}")
