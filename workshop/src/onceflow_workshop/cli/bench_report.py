"""What all benchmarks do with their results: a table, and JSON lines in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from onceflow.cli.text import laid_out, output_width
from onceflow_workshop.cli.bench_findings import finding

output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("bench-results.jsonl"),
    show_default=True,
    help="The file to which results are added as JSON lines.",
)

bootstrap_option = click.option(
    "--bootstrap-servers",
    help="host:port of a cluster that runs already and asks for no authentication. Topics are created there, and "
    "deleted in the end.  [default: a broker is started]",
)


def run_and_report(
    run: Callable[[Any, Callable[[str], None]], Iterator[dict[str, Any]]], choices: Any, output: Path
) -> None:
    """Run a benchmark, print the results and add them to a file. The exit code is 1 if outputs of a run were wrong."""
    report(measured(run, choices, output))


def measured(
    run: Callable[[Any, Callable[[str], None]], Iterator[dict[str, Any]]], choices: Any, output: Path
) -> list[dict[str, Any]]:
    """Run a benchmark and add its results to a file, each as soon as it is there."""
    from rich.console import Console

    errors = Console(stderr=True)
    results = []
    for result in run(choices, lambda text: errors.print(text)):
        results.append(result)
        with output.open("a") as handle:
            handle.write(json.dumps(result) + "\n")
    return results


def report(results: list[dict[str, Any]]) -> None:
    """Print results and what they say, and end the command with exit code 1 if outputs of a run were wrong."""
    print_tables(results)
    click.echo(finding(results))
    exit_if_wrong(results)


def exit_if_wrong(results: list[dict[str, Any]]) -> None:
    """The exit code is 1 if outputs of a run were wrong."""
    if any(result.get("correct", "yes") != "yes" for result in results):
        raise SystemExit(1)


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table for each benchmark."""
    width = output_width()
    for name in dict.fromkeys(result["bench"] for result in results):
        rows = [_flat(result) for result in results if result["bench"] == name]
        columns = list(dict.fromkeys(column for row in rows for column in row if column != "bench"))
        click.echo(f"{name}:")
        cells = [[_shown(row.get(column)) for column in columns] for row in rows]
        if len(rows) == 1:
            columns, cells = ["figure", "value"], [[*pair] for pair in zip(columns, *cells, strict=True)]
        for line in laid_out(columns, cells, width):
            click.echo(line)
        click.echo()


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of a result. Those of a part of it have its name in front of their own."""
    flat: dict[str, Any] = {}
    for name, value in result.items():
        parts = {f"{name}_{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
        flat |= parts
    return flat


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
