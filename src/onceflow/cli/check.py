"""A command whose exit code is a verdict, for monitoring: what was found is told apart from a check that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onceflow.errors import OptionError

if TYPE_CHECKING:
    from onceflow.admin.verify.report import Report

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
        try:
            return super().invoke(ctx)
        except SystemExit as error:  # of code of the user: a command itself returns its exit code
            raise OptionError(
                f"The code that was run has called sys.exit({error.code!r}), so nothing is known",
                next_step="correct it: a processor raises an exception instead",
            ) from error


class Errors:
    """With which exit code an error ends a command. `onceflow.cli.main` hands it to the command."""

    def __init__(self) -> None:
        self.exit_code = 1
