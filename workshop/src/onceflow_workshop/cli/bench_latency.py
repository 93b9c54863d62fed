"""``onceflow bench latency``: how late, and at what cost, a running service makes records visible."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from onceflow.cli.examples import examples
from onceflow.cli.text import Number
from onceflow_workshop.cli.bench_findings import finding
from onceflow_workshop.cli.bench_report import bootstrap_option, exit_if_wrong, measured, output_option, print_tables

# As in onceflow_workshop.bench, which is imported when something is measured.
WORKLOADS = ("copy", "balance")
ENGINES = ("auto", "driver", "tasks")  # as of ``planning.engine``, which imports pyspark
_MAX_TRIGGER_MS, _MAX_RATE = 60_000, 50_000


def several(name: str, one: Callable[[str], Any], default: str, metavar: str, text: str) -> Callable[..., Any]:
    """An option that may have several values: separated by commas, or given several times.

    Args:
        one: turns the text of one value into the value. It raises ValueError.
    """

    def convert(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> list[Any]:
        try:
            return [one(each.strip()) for texts in given for each in texts.split(",")]
        except ValueError as error:
            raise click.BadParameter(str(error), context, option) from error

    shown = f"{text}  [default: {default}]"
    return click.option(
        name, multiple=True, default=(default,), callback=convert, metavar=f"{metavar}[,...]", help=shown
    )


def one_of(*names: str) -> Callable[[str], str]:
    def known(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return known


def _trigger_ms(text: str) -> int:
    from onceflow.options.durations import duration_ms

    found = duration_ms(text)
    if not 1 <= found <= _MAX_TRIGGER_MS:
        raise ValueError(f"{text!r} is not from 1 ms to 1 minute")
    return found


def _rate(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_RATE:
        raise ValueError(f"{text!r} is not a number from 1 to {_MAX_RATE:,}")
    return int(text)


@examples(
    "onceflow bench latency --trigger 100ms,1s --plot latency.png",
    "onceflow bench latency --workload balance --rate 500 --json",
)
@click.command()
@several("--workload", one_of(*WORKLOADS), "copy", "[copy|balance]", "A copy, or balances of accounts (with state).")
@several("--engine", one_of(*ENGINES), "auto", "[auto|driver|tasks]", "The engine of `Flow.write`.")
@several("--trigger", _trigger_ms, "100ms", "DURATION", "How often the service commits.")
@several("--rate", _rate, "2000", "RECORDS", "Records per second that are sent.")
@click.option(
    "--value-bytes",
    type=click.IntRange(8, 500_000),
    help="Size of a value.  [default: 1024, and about 50 of a balance]",
)
@click.option(
    "--warm-seconds",
    type=Number(0, 600),
    default=15.0,
    show_default=True,
    help="How long records do not count, after the first output.",
)
@click.option("--seconds", type=Number(1, 3600), default=30.0, show_default=True, help="How long records count.")
@click.option(
    "--idle-seconds",
    type=Number(0, 600),
    default=5.0,
    show_default=True,
    help="How long the service is measured while nothing is sent, afterwards.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the distributions as a PNG.")
@bootstrap_option
@output_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each setting, and no table.")
def latency(
    workload: list[str],
    engine: list[str],
    trigger: list[int],
    rate: list[int],
    value_bytes: int | None,
    warm_seconds: float,
    seconds: float,
    idle_seconds: float,
    plot: Path | None,
    bootstrap_servers: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Measure the latency of a running service, and what it costs.

    Records are sent at a steady rate, and a read_committed consumer notes when what the service made of them is
    visible. Also measures the processor time of the service and of the broker in percent of a core, under load and
    idle, the memory of the service, and the time from its start to its first output. Several values of an option,
    separated by commas, are measured one after the other. The exit code is 1 when a record was missing, double or
    wrong.
    """
    from onceflow_workshop.bench import latency_plot
    from onceflow_workshop.bench.latency_runs import Choices, labels_of, run, settings_of

    if plot is not None:
        _check_plot(plot)
    settings = settings_of(workload, engine, trigger, rate, value_bytes)
    choices = Choices(settings, warm_seconds, seconds, idle_seconds, bootstrap_servers)
    curves: dict[str, list[float]] = {}
    labels = dict(zip(settings, labels_of(settings), strict=True))

    def figures(shown: Callable[[str, int, int], None]) -> Iterator[dict[str, Any]]:
        for found in run(choices, shown):
            curves[labels[found.setting]] = found.latencies_ms
            yield found.figures

    results = _measured(figures, output)
    if as_json:
        for result in results:
            click.echo(json.dumps(result))
    else:
        print_tables(results)
        click.echo(finding(results))
    if plot is not None:
        latency_plot.draw(plot, curves, f"Latency: {', '.join(_common(settings))}" if len(settings) > 1 else "Latency")
        click.echo(f"The plot is in {plot}.", err=True)
    exit_if_wrong(results)


def _measured(figures: Callable[[Callable[[str, int, int], None]], Iterator[dict[str, Any]]], output: Path) -> Any:
    from onceflow.cli.progress import progress_bar

    with progress_bar() as bar:

        def run_shown(choices: None, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
            last = ""

            def shown(text: str, done: int, total: int) -> None:
                nonlocal last
                bar(text, done, total)
                if text != last and not sys.stderr.isatty():
                    say(text)
                last = text

            yield from figures(shown)

        return measured(run_shown, None, output)


def _common(settings: Any) -> list[str]:
    """What is the same in all settings, in words."""
    words = [setting.words for setting in settings]
    return [words[0][kind] for kind in words[0] if len({each[kind] for each in words}) == 1]


def _check_plot(plot: Path) -> None:
    """Before anything is measured."""
    from onceflow_workshop.bench.latency_plot import module

    module("figure")
    if plot.suffix.lower() != ".png":
        raise click.UsageError(f"--plot {plot} does not end with .png")
    if not plot.absolute().parent.is_dir():
        raise click.UsageError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
