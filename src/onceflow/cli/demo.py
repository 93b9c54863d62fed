"""``onceflow demo``: run an example service, with crashes, and check what came out."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from onceflow.demos.chain import Choices

Command = Callable[..., int]


@click.group(invoke_without_command=True)
@click.pass_context
def demo(context: click.Context) -> None:
    """Run an example service, with crashes, and check what came out.

    Without a name, lists the demos.
    """
    if context.invoked_subcommand is None:
        for name, command in demo.commands.items():  # the one to begin with first
            click.echo(f"{name:12} {command.get_short_help_str(100)}")


def _options(*, records: int, kills: int = 3, kills_min: int) -> Callable[[Command], Command]:
    """Options that all demos have."""
    options = [
        click.option(
            "--records", type=click.IntRange(min=1), default=records, show_default=True, help="Deposits to produce."
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
@_options(records=200_000, kills_min=0)
def deposits(**given: Any) -> int:
    """Two flows in a chain, killed at random steps: validate deposits, settle them.

    The last line of stdout is JSON; exit code 0 only if nothing is lost, doubled or wrong.
    """
    # Imported here: listing the demos must not cost the imports of Kafka clients.
    from onceflow.demos.deposits import run

    return _run(run, **given)


@demo.command()
@_options(records=100_000, kills_min=1)
def balances(**given: Any) -> int:
    """Three flows in a chain, killed at random steps: validate and settle deposits, keep balances.

    Now and then the local state of the third is deleted, too. The last line of stdout is JSON; exit code 0 only if
    nothing is lost, doubled or wrong, and every balance is right, in the table topic and in the local store.
    """
    from onceflow.demos.balances import run

    return _run(run, **given)


@demo.command()
@_options(records=60_000, kills=2, kills_min=2)
def guarantees(**given: Any) -> int:
    """One copy service with each guarantee, killed at the same points: which loses, which doubles.

    The last line of stdout is JSON; exit code 0 only if at_most_once has lost and not doubled, at_least_once has
    doubled and not lost, and exactly_once has done neither.
    """
    from onceflow.demos.guarantees import run

    return _run(run, **given)


def _run(
    run: Callable[[Choices], dict[str, Any]],
    *,
    records: int,
    seed: int | None,
    kills: int,
    bootstrap_servers: str | None,
    timeout: float,
) -> int:
    from onceflow.demos.chain import Choices

    # `timeout`, CI and make end a run with SIGTERM; it must not leave a broker and JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = run(Choices(records, chosen, kills, bootstrap_servers, timeout))
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
