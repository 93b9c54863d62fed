"""``onceflow demo``: run an example service, crash it, and check its outputs."""

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

from onceflow.cli.examples import examples
from onceflow.cli.text import Number

Command = Callable[..., int]


@click.group(invoke_without_command=True)
@click.pass_context
def demo(context: click.Context) -> None:
    """Run an example service, crash it, and check its outputs.

    Without the name of a demo, the demos are listed. The last line of stdout is JSON. The exit code is 0 only if an
    independent audit found every record exactly once and with the right content.
    """
    if context.invoked_subcommand is None:
        for name, command in demo.commands.items():  # in the order of this module: the best one to begin with is first
            click.echo(f"{name:15} {command.get_short_help_str(100)}")


def _options(
    *,
    kills: int,
    records: int | None = None,
    kills_min: int = 0,
    of: str = "Records",
    victims: str = "each flow's driver is",
) -> Callable[[Command], Command]:
    """Options that all demos have; ``records`` only those that produce a certain number."""
    options = [
        click.option(
            "--seed", type=int, help="Decides the records and the kills.  [default: a new one, which is printed]"
        ),
        click.option(
            "--kills",
            type=click.IntRange(kills_min, 100),
            default=kills,
            show_default=True,
            help=f"How often {victims} killed with SIGKILL.",
        ),
        click.option(
            "--bootstrap-servers", help="A cluster that runs already.  [default: a broker is started for the demo]"
        ),
        click.option(
            "--timeout",
            type=Number(min=1),
            default=600,
            show_default=True,
            help="Fail after so many seconds.",
        ),
    ]
    if records is not None:
        number = click.IntRange(min=1)
        options.insert(
            0, click.option("--records", type=number, default=records, show_default=True, help=f"{of} to produce.")
        )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@examples("onceflow demo deposits --seed 7 --kills 5")
@demo.command()
@_options(records=200_000, kills=3)
def deposits(**given: Any) -> int:
    """Validate deposits and transfers, keep balances and a double-entry ledger.

    Two flows in a chain are killed at random steps. After some kills their local state is deleted, too. At every
    committed prefix of the ledger, no money was made or lost.
    """
    return _run("deposits", **given)


@examples("onceflow demo pairs")
@demo.command()
@_options(records=200_000, kills=2, of="Events")
@click.option(
    "--partitions", type=click.IntRange(1, 64), default=4, show_default=True, help="Partitions of the topics."
)
@click.option(
    "--version",
    "versions",
    type=click.Choice(["all", "processor", "join", "grouped"]),
    default="all",
    show_default=True,
    help="The version of the service to run.",
)
def pairs(**given: Any) -> int:
    """Join A and B events of one timestamp.

    Events come out of order, and some have no partner. There are three versions of the same service: a processor with
    timers, a stream-stream join, and an aggregation.
    """
    return _run("pairs", "PairsChoices", **given)


@examples("onceflow demo moving-average")
@demo.command("moving-average")
@_options(records=50_000, kills=2, of="Measurements")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture (PNG) to this file.")
def moving_average(**given: Any) -> int:
    """Compute moving averages of real series.

    They are over the last values, over the last minutes and over all values. One flow works record by record, one
    column by column, with the same results. With --plot, draws what is on the topics.
    """
    return _run("moving_average", "MovingAverageChoices", **given)


@examples("onceflow demo retry --kills 4")
@demo.command()
@_options(records=20_000, kills=2, of="Orders")
def retry(**given: Any) -> int:
    """Call a service that sometimes fails: dead letters, retries with backoff, parked records."""
    return _run("retry", **given)


@examples("onceflow demo outbox --kills 4")
@demo.command()
@_options(records=2_000, kills=2, of="Requests")
@click.option("--without-keys", is_flag=True, help="The service knows no idempotency keys: pay at most once.")
def outbox(**given: Any) -> int:
    """Call a payment service once for each request, with an idempotency key.

    The service is slow, fails and loses answers; the flow is killed, once in the middle of a call. Every payment must
    be charged exactly once, and the receipts on the topic must be those of the service. With --without-keys no payment
    may be charged twice, and each one whose outcome is not known must be listed.
    """
    return _run("outbox", "OutboxChoices", **given)


@examples("onceflow demo files")
@demo.command()
@_options(records=300, kills=2, of="Links")
@click.option("--big", is_flag=True, help="Add a file of 1 GB.")
def files(**given: Any) -> int:
    """Download files that records name by their links, and parse them into records.

    The server fails, truncates files, answers slowly and changes files during a download.
    """
    return _run("files", "FilesChoices", **given)


@examples("onceflow demo postgres --records 500000")
@demo.command()
@click.option("--dsn", help="A PostgreSQL server that runs already, as libpq takes it.  [default: one is started]")
@_options(records=200_000, kills=3, of="Deposits")
def postgres(**given: Any) -> int:
    """Write deposits to a PostgreSQL table while the flow and the server are killed.

    The table is compared row by row with what was produced, and its sums with a fold of the topic. A server that was
    started for the demo is killed as often as the flow's driver.
    """
    return _run("postgres", "PostgresChoices", **given)


@examples("onceflow demo tables")
@demo.command()
@click.option("--seconds", type=Number(min=1), default=50, show_default=True, help="How long to ask, and to kill.")
@_options(kills=3, victims="the flow's driver, and one of the instances, is")
def tables(**given: Any) -> int:
    """Ask two instances of the query server for a table, while they and the flow that writes it are killed.

    Every answer is compared with a fold of the table's topic at the position that the answer names. The last line of
    stdout is JSON. The exit code is 0 only if no answer was wrong or stale, and the balances add up to the input.
    """
    return _run("tables", "TablesChoices", **given)


@examples("onceflow demo guarantees")
@demo.command()
@_options(records=60_000, kills=2, kills_min=2)
def guarantees(**given: Any) -> int:
    """Compare the three guarantees under the same crashes.

    The same copy service runs with each of them and is killed at the same points. The last line of stdout is JSON. The
    exit code is 0 only if at_most_once lost and did not duplicate records, at_least_once duplicated and did not lose
    records, and exactly_once did neither.
    """
    return _run("guarantees", **given)


def _run(
    module: str,
    choices: str = "Choices",
    *,
    seed: int | None,
    kills: int,
    bootstrap_servers: str | None,
    timeout: float,
    **more: Any,
) -> int:
    # Imported here: listing the demos must not cost the imports of Kafka clients.
    demonstrated = importlib.import_module(f"onceflow_workshop.demos.{module}")
    # `timeout`, CI and make end a run with SIGTERM; it must not leave a broker and JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    options = {"seed": chosen, "kills": kills, "bootstrap_servers": bootstrap_servers, "timeout_s": timeout, **more}
    result = demonstrated.run(getattr(demonstrated, choices)(**options))
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
