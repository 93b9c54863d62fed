"""``onceflow bench cluster``: a flow with state on a standalone cluster, while executors and hosts come and go."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from onceflow.cli.examples import examples
from onceflow.cli.text import Number
from onceflow_workshop.cli.bench_findings import finding
from onceflow_workshop.cli.bench_latency import one_of, several
from onceflow_workshop.cli.bench_report import exit_if_wrong, measured, output_option, print_tables

# As in onceflow_workshop.bench, which is imported when something is measured.
PHASES = ("steady", "executor", "host", "growth", "shrink", "backlog")


@examples("onceflow bench cluster --phases steady,host --seconds 20", "onceflow bench cluster --phases backlog --local")
@click.command()
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Workers at the start, of one core each.",
)
@click.option(
    "--partitions",
    type=click.IntRange(1, 1000),
    default=16,
    show_default=True,
    help="Partitions of the source, and so of the table.",
)
@click.option(
    "--accounts",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Keys of the table. All are put in before anything is measured.",
)
@click.option(
    "--rate", type=click.IntRange(1, 100_000), default=2000, show_default=True, help="Records per second that are sent."
)
@click.option(
    "--seconds", type=Number(4, 3600), default=30.0, show_default=True, help="How long each phase under load takes."
)
@click.option(
    "--warm-seconds",
    type=Number(0, 600),
    default=20.0,
    show_default=True,
    help="How long records are sent before the first phase.",
)
@click.option(
    "--trigger-ms", type=click.IntRange(10, 60_000), default=200, show_default=True, help="How often the flow commits."
)
@click.option(
    "--copies",
    type=click.IntRange(1, 10),
    default=1,
    show_default=True,
    help="Copies of each partition of the table, on different hosts.",
)
@several(
    "--phases", one_of(*PHASES), ",".join(PHASES), "PHASE", f"What to measure, in this order: {', '.join(PHASES)}."
)
@click.option(
    "--backlog", type=click.IntRange(min=1), default=2_000_000, show_default=True, help="Records of the last phase."
)
@click.option("--local", is_flag=True, help="Also work off a backlog with a local master of as many cores.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for the logs of all processes, and a JSON line for each batch.",
)
@output_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each phase, and no table.")
def cluster(output: Path, as_json: bool, **given: Any) -> None:
    """Measure a flow with state on a standalone cluster.

    Each worker is a process with one core, and a host of its own. The phases: a steady load; an executor is killed; a
    host is killed and its disk lost; a host joins; a host leaves; a backlog. For each, how many records of the table
    were read again for each processed record, how many partitions have moved, and what it cost. All processes share
    this machine. The exit code is 1 when a record was not counted exactly once.
    """
    from onceflow.cli.progress import progress_bar
    from onceflow_workshop.bench.cluster import Choices, run

    given["phases"] = [phase for phase in PHASES if phase in given["phases"]]
    found: list[dict[str, Any]] = []
    with _terminated_as_interrupted(), progress_bar() as show:

        def run_shown(choices: Any, say: Any) -> Iterator[dict[str, Any]]:
            said = ""

            def shown(text: str, done: int, total: int) -> None:
                nonlocal said
                show(text, done, total)
                if text != said and not sys.stderr.isatty():
                    say(text)
                said = text

            for result in run(choices, shown):
                found.append(result)
                yield result

        try:
            measured(run_shown, Choices(**given), output)
        except BaseException:
            _print(found, as_json=as_json)  # what was measured until then
            raise
    _print(found, as_json=as_json)
    if not as_json:
        click.echo(finding(found))
    exit_if_wrong(found)


def _print(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if not as_json:
        print_tables(results)
        return
    for result in results:
        click.echo(json.dumps(result))


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends all processes of the cluster, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
