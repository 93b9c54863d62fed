"""``onceflow progress``: a flow's progress to a file, and from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connected, connection
from onceflow.cli.examples import examples
from onceflow.cli.flow_move import move_flow
from onceflow.cli.moving import Options, moving_options
from onceflow.cli.text import standard_input

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings


@click.group()
def progress() -> None:
    """Write the progress of a flow to a file, and commit the one of a file."""


@examples("onceflow progress export validated-deposits > validated-deposits.json")
@progress.command()
@click.argument("flow")
@connection
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--json", "as_json", is_flag=True, help="Print it in one line.")
def export(flow: str, settings: ClientSettings, transactional_id_prefix: str, as_json: bool) -> None:
    """Print where FLOW is: positions of its sources, its tables and its epoch, as JSON.

    It is what is committed now. No driver is fenced. Exit code 1: it has no progress, or Kafka does not answer.
    """
    from onceflow.admin.change import move as mover
    from onceflow.admin.change import progress_file
    from onceflow.clock import clock_ms
    from onceflow.protocol.names import Names

    names = Names(flow, transactional_id_prefix)
    with connected(settings, f"reading the progress of flow {flow}") as (cluster, deadline):
        found = mover.known(mover.committed(cluster, names, deadline), names)
    content = progress_file.export(found, flow, clock_ms())
    click.echo(json.dumps(content, indent=None if as_json else 2, sort_keys=True))


@examples(
    "onceflow progress import validated-deposits validated-deposits.json --dry-run",
    "onceflow progress import validated-deposits validated-deposits.json --yes",
)
@progress.command("import")
@click.argument("flow")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@connection
@click.option(
    "--state",
    type=click.Choice(["keep", "delete"]),
    help="If the tables have changed since the export: keep them as they are, or delete their rows.",
)
@moving_options(dry_run="Only show what would be done. No driver is fenced.", prefixes="The same as in `Flow(...)`.")
def import_(
    flow: str,
    file: str,
    settings: ClientSettings,
    state: str | None,
    options: Options,
) -> None:
    """Commit the positions in FILE (- for standard input) as the progress of FLOW. A running driver is fenced.

    The topics must be those of the export, and hold the offsets. State goes with it if the tables have not changed
    since the export; otherwise --state says what becomes of them.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.admin.change import progress_file, progress_import
    from onceflow.admin.change.move_plan import KEEP

    names = options.names(flow)
    wanted = progress_file.parse(_text(file), Path(file).name)
    move_flow(
        settings,
        options,
        flow,
        state or KEEP,
        lambda cluster: progress_import.preview(cluster, names, wanted, state).move,
        lambda cluster, tell: progress_import.restore(cluster, names, wanted, state, tell),
    )


def _text(file: str) -> str:
    """The text of a file; of standard input for ``-``."""
    try:
        return standard_input().read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not a text in UTF-8: {error}") from error
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
