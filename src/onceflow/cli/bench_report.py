"""What all benchmarks do with their results: a table, and JSON lines in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

# A terminal is 80 characters wide: a few results with more figures than these stand side by side, a line per figure.
_MAX_COLUMNS, _MAX_SIDE_BY_SIDE = 8, 5

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
    # At Ctrl-C, py4j logs where it waited for the JVM, to the root logger.
    logging.getLogger().addFilter(lambda record: "while sending command" not in record.getMessage())
    results = []
    for result in run(choices, lambda text: errors.print(text)):
        results.append(result)
        with output.open("a") as handle:
            handle.write(json.dumps(result) + "\n")
    return results


def report(results: list[dict[str, Any]]) -> None:
    """Print results, and end the command with exit code 1 if outputs of a run were wrong."""
    print_tables(results)
    click.echo(json.dumps(results[-1]))
    exit_if_wrong(results)


def exit_if_wrong(results: list[dict[str, Any]]) -> None:
    """The exit code is 1 if outputs of a run were wrong."""
    if any(result.get("correct", "yes") != "yes" for result in results):
        raise SystemExit(1)


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table for each benchmark."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    for name in dict.fromkeys(result["bench"] for result in results):
        rows = [result for result in results if result["bench"] == name]
        columns = [key for key in rows[0] if key != "bench"]
        lines = [columns, *[[_shown(row[column]) for column in columns] for row in rows]]
        if len(columns) > _MAX_COLUMNS and len(rows) <= _MAX_SIDE_BY_SIDE:
            sides = [list(line) for line in zip(*lines, strict=True)]
            lines = [["figure", "value"], *sides] if len(rows) == 1 else sides
        table = Table(*[Column(each, justify="right", overflow="fold") for each in lines[0]], title=name)
        for line in lines[1:]:
            table.add_row(*line)
        console.print(table)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
