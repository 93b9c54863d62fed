"""What ``onceflow verify`` and ``onceflow compare`` print of a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onceflow.admin.verify.report import Report

_PLURAL = re.compile(r"\b(record|row|offset|partition|output)s\b")


def print_report(report: Report, head: Mapping[str, Any], *, done: str, verdict: str, as_json: bool) -> None:
    """Print the findings, what is known besides, and the verdict.

    Args:
        head: how the last line of JSON begins.
        done: what was done with the records: ``checked``, ``compared``.
        verdict: the last line for people.
    """
    for each in report.examples:
        if as_json:
            click.echo(json.dumps(asdict(each)))
        else:
            places = ", ".join(f"{place.topic}-{place.partition}@{place.offset}" for place in each.places)
            click.echo(f"{each.kind}: {each.text}" + (f": {places}" if places else ""))
    if as_json:
        tail = {"found": report.counts, "checked": report.checked, "notes": report.notes}
        click.echo(json.dumps({**head, **tail, "unjudged": report.unjudged, "not_checked": report.not_checked}))
        return
    for note in report.notes:
        click.echo(f"note: {note}")
    for what in report.unjudged:
        click.echo(f"not judged: {what}")
    for what in report.not_checked:
        click.echo(f"not {done}: {what}")
    click.echo(f"{done}: " + ", ".join(_counted(count, name) for name, count in report.checked.items()))
    click.echo(verdict)


def _counted(count: int, name: str) -> str:
    """``1 source record``, ``2,000 source records``."""
    if count == 1:
        name = _PLURAL.sub(r"\1", name, count=1)
    return f"{count:,} {name}"
