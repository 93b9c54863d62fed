"""``onceflow chaos``: break everything around running flows, and judge what they wrote."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from onceflow.errors import OptionError


@click.command()
@click.option("--seconds", type=click.FloatRange(min=10), default=180, show_default=True, help="How long to go on.")
@click.option("--seed", type=int, help="Of the faults and their order.  [default: a new one, printed]")
@click.option("--setup", "setups", multiple=True, help="May be repeated.  [default: all in turn]")
@click.option("--kind", "kinds", multiple=True, help="Of fault; may be repeated.  [default: all that make sense]")
@click.option("--list", "list_only", is_flag=True, help="Show the setups and the kinds of faults.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="A new folder for logs and histories.")
def chaos(
    seconds: float,
    seed: int | None,
    setups: tuple[str, ...],
    kinds: tuple[str, ...],
    list_only: bool,
    keep: Path | None,
) -> int:
    """Kill, stop and cut everything around running flows, then check every record.

    Clusters of Kafka and Spark are started for it. The last line of stdout is JSON; exit code 0 only if nothing is
    lost, doubled, torn or wrong.
    """
    from onceflow.chaos.fault_kinds import FAULT_KINDS
    from onceflow.chaos.test_bed import SETUPS

    if list_only:
        click.echo("setups: " + ", ".join(SETUPS))
        click.echo("kinds:  " + ", ".join(FAULT_KINDS))
        return 0
    _check(setups, list(SETUPS), "--setup")
    _check(kinds, list(FAULT_KINDS), "--kind")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise OptionError(f"{keep} is not empty", next_step="name a new folder")
    from onceflow.chaos.run import run

    # `timeout`, CI and make end a run with SIGTERM; it must not leave brokers and JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = run(seconds=seconds, seed=chosen, setups=setups or list(SETUPS), kinds=kinds, keep=keep)
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _check(given: tuple[str, ...], known: list[str], option: str) -> None:
    for name in given:
        if name not in known:
            raise OptionError(f"{option} {name!r} is not known", next_step=f"there are: {', '.join(known)}")


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
