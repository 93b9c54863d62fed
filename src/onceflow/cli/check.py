"""A command whose exit code is a verdict, for monitoring: what was found is told apart from a check that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onceflow.admin.verify_report import Report

FINDING = 1
NOT_CHECKED = 2
"""The exit code of an error, as of wrong usage: nothing is known then."""


def verdict(report: Report, *, allow_unjudged: bool = False) -> int:
    """The exit code of what was found; a finding counts more than what could not be checked or judged."""
    if report.counts:
        return FINDING
    unknown = report.not_checked or (report.unjudged and not allow_unjudged)
    return NOT_CHECKED if unknown else 0


class Check(click.Command):
    """Exit codes: 0 nothing found; 1 a finding; 2 not checked, because of an error or wrong usage; 130 interrupted."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(ctx.obj, Errors):
            ctx.obj.exit_code = NOT_CHECKED
        return super().invoke(ctx)


class Errors:
    """With which exit code an error ends a command. `onceflow.cli.main` hands it to the command."""

    def __init__(self) -> None:
        self.exit_code = 1
