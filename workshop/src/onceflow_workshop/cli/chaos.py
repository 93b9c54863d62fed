"""``onceflow chaos``: inject faults around running flows, and check what they wrote."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from onceflow.cli.examples import examples
from onceflow.cli.text import Number
from onceflow.errors import OptionError


@examples("onceflow chaos --seconds 600 --seed 7")
@click.command()
@click.option(
    "--seconds",
    type=Number(min=10),
    default=180,
    show_default=True,
    help="About how many seconds the run takes.",
)
@click.option(
    "--seed", type=int, help="Decides which faults come in which order.  [default: a new one, which is printed]"
)
@click.option(
    "--setup", "setups", multiple=True, help="A setup to run; may be repeated.  [default: all of them in turn]"
)
@click.option(
    "--kind", "kinds", multiple=True, help="A kind of fault to inject; may be repeated.  [default: all that make sense]"
)
@click.option(
    "--flow", "flows", multiple=True, help="A flow to run; may be repeated.  [default: the flows of each setup]"
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    help="What engine= flows start with; may be repeated.  [default: auto, driver and tasks, as the seed says]",
)
@click.option(
    "--observe",
    is_flag=True,
    help="Run status, transactions list and verify (with --replay and --state-dir, too) all the time, and check them.",
)
@click.option(
    "--list", "list_only", is_flag=True, help="List setups, kinds of faults, flows and engines, and run nothing."
)
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and histories in this new folder."
)
def chaos(
    seconds: float,
    seed: int | None,
    setups: tuple[str, ...],
    kinds: tuple[str, ...],
    flows: tuple[str, ...],
    engines: tuple[str, ...],
    observe: bool,
    list_only: bool,
    keep: Path | None,
) -> int:
    """Inject faults around running flows, and check what they wrote.

    Processes are killed and stopped, and connections are cut. The test bed is started for it: clusters of Kafka and
    Spark, and the driver process of the flows. The last line of stdout is JSON. The exit code is 0 only if nothing is
    lost, duplicated, torn or wrong.
    """
    from onceflow.planning.engine import ENGINES
    from onceflow_workshop.chaos.fault_kinds import FAULT_KINDS
    from onceflow_workshop.chaos.flows import FLOWS, JOINER, LEDGER
    from onceflow_workshop.chaos.test_bed import SETUPS

    if list_only:
        click.echo("setups: " + ", ".join(SETUPS))
        click.echo("kinds:  " + ", ".join(FAULT_KINDS))
        click.echo("flows:  " + ", ".join(FLOWS))
        click.echo("engines: " + ", ".join(ENGINES))
        return 0
    _check(setups, list(SETUPS), "--setup")
    _check(kinds, list(FAULT_KINDS), "--kind")
    _check(flows, list(FLOWS), "--flow")
    _check(engines, list(ENGINES), "--engine")
    if JOINER in flows and LEDGER not in flows:
        raise OptionError("--flow joiner reads the table of ledger", next_step="add --flow ledger")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise OptionError(f"{keep} is not empty", next_step="name a new folder")
    from onceflow_workshop.chaos.run import run

    # `timeout`, CI and make end a run with SIGTERM; it must not leave brokers and JVMs behind.
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    result = run(
        seconds=seconds,
        seed=chosen,
        setups=setups or list(SETUPS),
        kinds=kinds,
        flows=tuple(dict.fromkeys(flows)),
        engines=engines or ENGINES,
        observe=observe,
        keep=keep,
    )
    click.echo(json.dumps(result))
    return 0 if result["verdict"] == "passed" else 1


def _check(given: tuple[str, ...], known: list[str], option: str) -> None:
    for name in given:
        if name not in known:
            raise OptionError(f"{option} {name!r} is not known", next_step=f"there are: {', '.join(known)}")


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
