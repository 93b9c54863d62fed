"""``onceflow demo``: run an example service, with crashes, and check what came out."""

from __future__ import annotations

import importlib
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

Command = Callable[..., int]


@click.group(invoke_without_command=True)
@click.pass_context
def demo(context: click.Context) -> None:
    """Run an example service, with crashes, and check what came out.

    Without a name, lists the demos. The last line of stdout is JSON; the exit code is 0 only if an independent audit
    has found every record exactly once, as it must be.
    """
    if context.invoked_subcommand is None:
        for name, command in demo.commands.items():  # the one to begin with first
            click.echo(f"{name:15} {command.get_short_help_str(100)}")


def _options(*, records: int, kills: int, kills_min: int = 0, of: str = "Records") -> Callable[[Command], Command]:
    """Options that all demos have."""
    options = [
        click.option(
            "--records", type=click.IntRange(min=1), default=records, show_default=True, help=f"{of} to produce."
        ),
        click.option("--seed", type=int, help="Of the records and the kills.  [default: a new one, printed]"),
        click.option(
            "--kills",
            type=click.IntRange(kills_min, 100),
            default=kills,
            show_default=True,
            help="SIGKILLs for each flow.",
        ),
        click.option("--bootstrap-servers", help="A running cluster.  [default: a broker is started for the demo]"),
        click.option(
            "--timeout", type=click.FloatRange(min=1), default=600, show_default=True, help="Most seconds it takes."
        ),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@demo.command()
@_options(records=200_000, kills=3)
def deposits(**given: Any) -> int:
    """Validate deposits and transfers, keep balances and a double-entry ledger.

    Two flows in a chain, killed at random steps; now and then their local state is deleted, too. Money is neither made
    nor lost at any committed prefix of the ledger.
    """
    return _run("deposits", **given)


@demo.command()
@_options(records=200_000, kills=2, of="Events")
@click.option("--partitions", type=click.IntRange(1, 64), default=4, show_default=True, help="Of the topics.")
@click.option(
    "--version",
    "versions",
    type=click.Choice(["all", "processor", "join", "grouped"]),
    default="all",
    show_default=True,
    help="Which version of the service.",
)
def pairs(**given: Any) -> int:
    """Bring A and B events of one timestamp together, out of order, with partners missing.

    Three versions of the same service: a processor with timers, a stream-stream join, an aggregation.
    """
    return _run("pairs", "PairsChoices", **given)


@demo.command("moving-average")
@_options(records=50_000, kills=2, of="Measurements")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Where the picture goes (PNG).")
def moving_average(**given: Any) -> int:
    """Averages over the last values, the last minutes and since the start, of real series.

    Record by record and column by column, with the same results. Draws what is on the topics.
    """
    return _run("moving_average", "MovingAverageChoices", **given)


@demo.command()
@_options(records=20_000, kills=2, of="Orders")
def retry(**given: Any) -> int:
    """Call what fails now and then: dead letters, retries with backoff, parked records."""
    return _run("retry", **given)


@demo.command()
@_options(records=300, kills=2, of="Links")
@click.option("--big", is_flag=True, help="One of the files has 1 GB.")
def files(**given: Any) -> int:
    """Download files that links on a topic name, and parse them into records.

    From a server that fails, truncates, answers slowly and changes its mind.
    """
    return _run("files", "FilesChoices", **given)


@demo.command()
@_options(records=60_000, kills=2, kills_min=2)
def guarantees(**given: Any) -> int:
    """One copy service with each guarantee, killed at the same points: which loses, which doubles.

    The last line of stdout is JSON; exit code 0 only if at_most_once has lost and not doubled, at_least_once has
    doubled and not lost, and exactly_once has done neither.
    """
    return _run("guarantees", **given)


def _run(
    module: str,
    choices: str = "Choices",
    *,
    records: int,
    seed: int | None,
    kills: int,
    bootstrap_servers: str | None,
    timeout: float,
    **more: Any,
) -> int:
    # Imported here: listing the demos must not cost the imports of Kafka clients.
    demonstrated = importlib.import_module(f"onceflow.demos.{module}")
    # `timeout`, CI and make end a run with SIGTERM; it must not leave a broker and JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = demonstrated.run(
        getattr(demonstrated, choices)(records, chosen, kills, bootstrap_servers, timeout, **more)
    )
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
