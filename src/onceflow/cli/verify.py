"""``onceflow verify``: an audit of a flow by an outsider."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from onceflow.cli.check import Check, verdict
from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.registry import registry_options
from onceflow.cli.report_text import print_report

if TYPE_CHECKING:
    from onceflow.admin.verify.report import Report
    from onceflow.client.settings import ClientSettings
    from onceflow.schema_registry.json_view import JsonView


@examples(
    "onceflow verify validated-deposits",
    "onceflow verify validated-deposits --id '$.id' --dead-letter rejected",
    "onceflow verify copy --id record --partitioner any --json",
    "onceflow verify balances --replay service.py:Balance",
    "onceflow verify balances --tables",
)
@click.command(cls=Check)
@click.argument("flow")
@click.option("--id", "identity", metavar="PLACE", help="Compare records by $.field, key, header:NAME or record.")
@click.option(
    "--output", "outputs", multiple=True, metavar="TOPIC", help="An output.  [default: as progress names them]"
)
@click.option(
    "--dead-letter",
    "letters",
    multiple=True,
    metavar="TOPIC",
    help="A topic of dead letters or late records.  [default with --id: those that progress names]",
)
@click.option("--replay", metavar="MODULE:CLASS", help="Run this processor again (or path.py:object), and compare.")
@click.option("--table", metavar="TABLE", help="The table of the processor.  [default: the only one of the flow]")
@click.option("--source", "sources", multiple=True, metavar="TOPIC", help="A topic that it reads.  [default: all]")
@click.option("--tables-only", is_flag=True, help="With --replay: do not compare outputs.")
@click.option(
    "--since",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="With --replay: begin with the state of an export of progress, not an empty one.",
)
@click.option(
    "--from",
    "begin",
    metavar="PLACE",
    help="Where the flow has begun: earliest, timestamp=TIME or offsets=TOPIC:PARTITION=OFFSET,...  "
    "[default: as its first progress record says]",
)
@click.option("--tables", is_flag=True, help="Read the tables: rows in wrong partitions, and those of other programs.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Compare the local copies of the tables in this folder with their topics.",
)
@click.option("--in-each", is_flag=True, help="Each record is in every output, not in one of them.")
@click.option("--unordered", is_flag=True, help="The records of a key need not be in the order of the source.")
@click.option("--filtered", is_flag=True, help="The flow leaves out records: missing ones are not lost.")
@click.option(
    "--partitioner",
    type=click.Choice(["key", "any"]),
    default="key",
    show_default=True,
    help="key: records are where the Java client puts their keys.",
)
@click.option("--allow-unjudged", is_flag=True, help="Exit code 0 although something could not be judged.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Findings of a kind to show.")
@click.option(
    "--scratch", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Folder for scratch files."
)
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", help="The same as in `Flow(...)`.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each finding, and a last one with the sums."
)
@connection
@registry_options
def verify(
    flow: str,
    identity: str | None,
    outputs: tuple[str, ...],
    letters: tuple[str, ...],
    replay: str | None,
    table: str | None,
    sources: tuple[str, ...],
    tables_only: bool,
    since: IO[str] | None,
    begin: str | None,
    tables: bool,
    state_dir: Path | None,
    in_each: bool,
    unordered: bool,
    filtered: bool,
    partitioner: str,
    allow_unjudged: bool,
    limit: int,
    scratch: Path | None,
    transactional_id_prefix: str,
    group_id_prefix: str | None,
    as_json: bool,
    settings: ClientSettings,
    view: JsonView | None,
) -> int:
    """Check what FLOW has committed: its progress, its group, its tables, and with --id or --replay every record.

    It reads committed records only, fences nobody, and may be run while the flow runs. --id is for a flow that writes
    one output per source record: a source record below the committed position has to be in the outputs or letters
    exactly as often as in the source. Records without the id are compared as a whole. With --replay, the processor of
    the flow runs again, here and without Spark; its state has to be that of the table, and its outputs those on the
    topics.

    Exit codes: 0 nothing is wrong; 1 something is; 2 not checked: an error, wrong usage, an id that only one side has,
    or something that could not be judged; 130 interrupted.
    """
    from onceflow.admin.change.progress_file import parse
    from onceflow.admin.change.target import parse_target
    from onceflow.admin.verify.audit import Audit, Outputs
    from onceflow.admin.verify.beginning import offsets_at
    from onceflow.admin.verify.identity import identity_of
    from onceflow.admin.verify.local_copies import LocalCopies
    from onceflow.admin.verify.progress_history import last_of, read_history
    from onceflow.admin.verify.replay_audit import ReplayAudit, ReplayOptions
    from onceflow.admin.verify.replayed_processor import load
    from onceflow.admin.verify.table_audit import TableAudit
    from onceflow.admin.verify.tally import RecordComparison
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import Names

    _check_usage(
        {"--id": identity, "--replay": replay},
        {"--output": outputs, "--dead-letter": letters, "--from": begin},
        {"--in-each": in_each, "--filtered": filtered, "--unordered": unordered},
        {"--table": table, "--source": sources, "--tables-only": tables_only, "--since": since},
    )
    names = Names(flow, transactional_id_prefix, group_id_prefix)
    target = None if begin is None else parse_target(begin, "--from")
    place = None if identity is None else identity_of(identity, None if view is None else lambda raw: view.read(raw)[0])
    processor = None if replay is None else load(replay)
    export = None if since is None else parse(_text(since), since.name)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contextlib.closing(Cluster(settings)))
        check = stack.enter_context(interruptible())
        show = stack.enter_context(progress_bar())

        def tell(text: str, done: int, total: int | None) -> None:
            check()
            show(text, done, total)

        first = None if target is None else offsets_at(cluster, names, target)
        wanted = Outputs(place, outputs, letters, in_each, filtered, partitioner == "key", not unordered, first)
        if identity != "record":
            wanted = replace(wanted, place=identity)
        report = Audit(cluster, names, wanted, limit=limit, tell=tell, check=check).run(
            stack.enter_context(RecordComparison(scratch))
        )
        if processor is not None:
            options = ReplayOptions(processor, table, sources, outputs, letters, tables_only, first, export)
            ReplayAudit(cluster, names, options, report, scratch=scratch, tell=tell, check=check).run()
        if tables or state_dir is not None:
            progress = last_of(read_history(cluster, names, check), names)
            if tables:
                TableAudit(cluster, report, tell=tell, check=check).run(progress)
            if state_dir is not None:
                LocalCopies(cluster, names, report, scratch=scratch, tell=tell, check=check).run(state_dir, progress)
    _print(flow, report, as_json)
    return verdict(report, allow_unjudged=allow_unjudged)


def _check_usage(
    ways: dict[str, object], of_both: dict[str, object], of_id: dict[str, object], of_replay: dict[str, object]
) -> None:
    """Refuse options that have no effect.

    Raises:
        click.UsageError: there are some.
    """
    by_id, by_replay = (way is not None for way in ways.values())
    if by_id and by_replay:
        raise click.UsageError("give --id or --replay, not both")
    needed = [
        (of_both, by_id or by_replay, "--id or --replay"),
        (of_id, by_id, "--id"),
        (of_replay, by_replay, "--replay"),
    ]
    for options, there, what in needed:
        if not there and (vain := [name for name, value in options.items() if value]):
            raise click.UsageError(f"{', '.join(vain)} has no effect without {what}")


def _print(flow: str, report: Report, as_json: bool) -> None:
    sums = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.items())
    right = "nothing wrong" if report.exact else "nothing wrong in what was checked and judged"
    head = {"flow": flow, "exact": report.exact}
    print_report(report, head, done="checked", verdict=f"{flow}: {sums or right}", as_json=as_json)


def _text(file: IO[str]) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--since {file.name} is not a text in UTF-8: {error}") from error
