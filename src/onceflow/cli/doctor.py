"""``onceflow doctor``: is everything set up right?"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection_options, settings_of
from onceflow.cli.examples import examples
from onceflow.cli.text import shown

if TYPE_CHECKING:
    from onceflow.admin.doctor.finding import Finding

_COLOURS = {"ok": "green", "skipped": "cyan", "warning": "yellow", "error": "red"}


@examples(
    "onceflow doctor validated-deposits --bootstrap-servers localhost:9092",
    "onceflow doctor --topic deposits --strict --json",
)
@click.command()
@click.argument("flow", required=False)
@click.option("--topic", "topics", multiple=True, metavar="T", help="Also look at this topic; may be repeated.")
@click.option(
    "--state-dir",
    "state_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder of local state; may be repeated.  [default: that of flows]",
)
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", help="The same as in `Flow(...)`.")
@click.option("--no-session", is_flag=True, help="Do not start Spark, which takes some seconds.")
@click.option("--strict", is_flag=True, help="Warnings are failures, too.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each finding.")
@connection_options
def doctor(
    flow: str | None,
    topics: tuple[str, ...],
    state_dirs: tuple[Path, ...],
    transactional_id_prefix: str,
    group_id_prefix: str | None,
    no_session: bool,
    strict: bool,
    as_json: bool,
    bootstrap_servers: str | None,
    options: tuple[str, ...],
    config_file: str | None,
) -> int:
    """Check this machine, the cluster, and the topics and permissions of FLOW.

    Each finding is ok, skipped (it could not be found out), a warning or an error, and says what to do. Nothing is
    changed, and no running driver is fenced. The exit code is 1 if there is an error.
    """
    from onceflow.admin.doctor import machine as doctor_machine
    from onceflow.admin.doctor.finding import failed
    from onceflow.errors import OptionError
    from onceflow.protocol.names import Names

    names = None if flow is None else Names(flow, transactional_id_prefix, group_id_prefix)
    with _quiet():
        host = doctor_machine.this_machine(state_dirs)
        found = _print("This machine", doctor_machine.local_findings(host, session=not no_session), as_json)
        try:
            from onceflow.admin.doctor import checks as of_cluster

            settings = settings_of(bootstrap_servers, options, config_file)
        except ImportError as problem:  # of the Kafka client, for example
            found += _print("Kafka", iter([doctor_machine.not_importable(problem)]), as_json)
        except OptionError as problem:
            found += _print("Kafka", iter([doctor_machine.no_cluster(problem)]), as_json)
        else:
            title = f"Kafka at {settings.bootstrap_servers}" + (f", flow {flow}" if flow else "")
            found += _print(title, of_cluster.cluster_findings(settings, names, topics, host), as_json)
    if not as_json:
        counts = {level: sum(each.level.value == level for each in found) for level in _COLOURS}
        click.echo(", ".join(f"{count} {level}" for level, count in counts.items()))
    return 1 if failed(found, strict=strict) else 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without onceflow's own warnings: what they say is among the findings."""
    logger = logging.getLogger("onceflow")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _print(title: str, findings: Iterator[Finding], as_json: bool) -> list[Finding]:
    """Print findings: as JSON, as a table on a terminal, else as lines. Returns them."""
    from rich.console import Console

    if as_json:
        found = []
        for each in findings:
            found.append(each)
            click.echo(json.dumps(_document(each)))
        return found
    console = Console(highlight=False)
    if console.is_terminal:
        with console.status(f"{title} ..."):
            found = list(findings)
        _print_table(console, title, found)
        return found
    found = []
    for each in findings:
        found.append(each)
        level = each.level.value.ljust(len("warning"))
        fix = f" | fix: {shown(each.fix)}" if each.fix else ""
        click.echo(f"{level} {each.check}: {shown(each.subject)}: {shown(each.found)}{fix}")
    return found


def _print_table(console: object, title: str, findings: Iterable[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    table = Table("", "check", "of", "found, and what to do", title=title, title_justify="left")
    for each in findings:
        text = Text(shown(each.found))
        if each.fix:
            text.append(f"\n→ {shown(each.fix)}", style="bold")
        level = each.level.value
        table.add_row(Text(level, style=_COLOURS[level]), each.check, Text(shown(each.subject)), text)
    console.print(table)


def _document(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "subject": finding.subject,
        "found": finding.found,
        "fix": finding.fix,
    }
