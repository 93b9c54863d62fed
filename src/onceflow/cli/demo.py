"""``onceflow demo``: run an example service, with crashes, and check what came out."""

from __future__ import annotations

import json
import random
import signal
from types import FrameType
from typing import NoReturn

import click


@click.group(invoke_without_command=True)
@click.pass_context
def demo(context: click.Context) -> None:
    """Run an example service, with crashes, and check what came out.

    Without a name, lists the demos.
    """
    if context.invoked_subcommand is None:
        for name in demo.list_commands(context):
            command = demo.get_command(context, name)
            click.echo(f"{name:12} {command.get_short_help_str(100) if command else ''}")


@demo.command()
@click.option("--records", type=click.IntRange(min=1), default=200_000, show_default=True, help="Deposits to produce.")
@click.option("--seed", type=int, help="Of the records and the kills.  [default: a new one, printed]")
@click.option("--kills", type=click.IntRange(0, 100), default=3, show_default=True, help="SIGKILLs for each flow.")
@click.option("--bootstrap-servers", help="A running cluster.  [default: a broker is started for the demo]")
@click.option("--timeout", type=click.FloatRange(min=1), default=600, show_default=True, help="Most seconds it takes.")
def deposits(records: int, seed: int | None, kills: int, bootstrap_servers: str | None, timeout: float) -> int:
    """Two flows in a chain, killed at random steps: validate deposits, settle them.

    The last line of stdout is JSON; exit code 0 only if nothing is lost, doubled or wrong.
    """
    # Imported here: listing the demos must not cost the imports of Kafka clients.
    from onceflow.demos.deposits import Choices, run

    # `timeout`, CI and make end a run with SIGTERM; it must not leave a broker and two JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = run(Choices(records, chosen, kills, bootstrap_servers, timeout))
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
