"""Examples at the end of a command's help text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

_CommandT = TypeVar("_CommandT", bound=click.Command)


def examples(*lines: str) -> Callable[[_CommandT], _CommandT]:
    """Show these command lines at the end of ``--help``, one in each line. A test parses each of them.

    Args:
        lines: whole lines of a shell that call ``onceflow``.
    """

    def add(command: _CommandT) -> _CommandT:
        heading = "Example:" if len(lines) == 1 else "Examples:"
        command.epilog = "\n".join(("\b", heading, *(f"  {line}" for line in lines)))  # \b: lines stay as they are
        return command

    return add
