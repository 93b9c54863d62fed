"""The command ``onceflow``: runs the subcommand, and turns errors into text and exit codes.

Exit codes: 0 success; 1 a failed check or an error; 2 wrong usage; 130 interrupted. Errors of a `Check` are 2, too.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import importlib.metadata
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence

import click

from onceflow._version import __version__
from onceflow.cli.check import FINDING, Errors
from onceflow.cli.interrupts import INTERRUPTED
from onceflow.client.interrupts import CommitInterruptedError, interrupts_kept
from onceflow.errors import OnceflowError

# By name: where the command is, and its line in `onceflow --help`. Each command is imported when it is called, or every
# call would import Spark and the Kafka clients.
COMMANDS = {
    "broker": ("onceflow.cli.broker:broker", "Run a real Apache Kafka on this machine."),
    "claim-check": ("onceflow.cli.claim_check:claim_check", "Delete stored values that no record refers to any more."),
    "compare": ("onceflow.cli.compare:compare", "Compare what a flow and its copy have written."),
    "completion": ("onceflow.cli.completion:completion", "Print the script with which a shell completes commands."),
    "consume": ("onceflow.cli.consume:consume", "Show the committed records of a topic."),
    "doctor": ("onceflow.cli.doctor:doctor", "Check this machine, the cluster, and what a flow needs there."),
    "fork": ("onceflow.cli.fork:fork", "Copy a running flow, to try a new version beside it."),
    "new": ("onceflow.cli.new:new", "Write a small project to start from."),
    "parked": ("onceflow.cli.parked:parked", "List, show, retry and drop parked records; replay dead letters."),
    "peek": ("onceflow.cli.peek:peek", "Show the newest committed records of a topic."),
    "produce": ("onceflow.cli.produce:produce", "Write the lines of standard input to a topic."),
    "progress": ("onceflow.cli.progress_file:progress", "Export and import the progress of a flow."),
    "promote": ("onceflow.cli.promote:promote", "Let a new version take the place of the running one."),
    "reset": ("onceflow.cli.reset:reset", "Delete a flow's progress, or move it to other offsets."),
    "setup": ("onceflow.cli.setup:setup", "Download the jars for Spark and for the local broker."),
    "status": ("onceflow.cli.status:status", "Show where flows are, and how far behind."),
    "table": ("onceflow.cli.table:table", "Look into tables, serve them over HTTP, maintain those of flows."),
    "topic": ("onceflow.cli.topic:topic", "Create, list, describe and delete topics."),
    "transactions": ("onceflow.cli.transactions:transactions", "List, describe and abort open transactions."),
    "verify": ("onceflow.cli.verify:verify", "Check what a flow has committed: progress, tables, records."),
}
#: Further commands, of other packages: an entry point of this group names such a mapping.
ENTRY_POINTS = "onceflow.commands"
#: Commands of a package that users do not need.
WORKSHOP = ("bench", "chaos", "demo")

#: What a write to standard output says if a disk is full, or has failed.
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
#: As of a program that SIGPIPE has ended.
_BROKEN_PIPE = 141


@functools.cache
def commands() -> dict[str, tuple[str, str]]:
    """All commands, with those of other packages that are installed. A package that cannot be loaded is named."""
    found: dict[str, tuple[str, str]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found |= {str(name): (str(target), str(line)) for name, (target, line) in point.load().items()}
        except Exception as error:  # whatever its code raises: the other commands work
            click.echo(f"onceflow: the commands of {point.value!r} cannot be loaded: {error}", err=True)
    return found | COMMANDS


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = (COMMANDS if cmd_name in COMMANDS else commands()).get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target[0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target[0]} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click looks for similar names among commands that are imported, of which this group has none."""
        name = args[0]
        if name not in COMMANDS and name not in commands() and not name.startswith("-") and not ctx.resilient_parsing:
            if name in WORKSHOP:
                raise click.UsageError(
                    f"{name!r} is a command of the package onceflow-workshop: pip install ./workshop in a checkout", ctx
                )
            similar = difflib.get_close_matches(name, commands(), 1)
            meant = f" Did you mean {similar[0]!r}?" if similar else ""
            raise click.UsageError(f"No such command {name!r}.{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, commands()[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onceflow", message="%(prog)s %(version)s")
def cli() -> None:
    """Exactly-once Kafka pipelines for PySpark."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; always ends with SystemExit."""
    errors = Errors()
    _print_anything()
    try:
        # A command may return an exit code; without one it is a success.
        with interrupts_kept():
            result = cli.main(args=arguments, prog_name="onceflow", standalone_mode=False, obj=errors)
    except OnceflowError as error:
        click.echo(f"onceflow: {error}", err=True)
        sys.exit(errors.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        if isinstance(error, click.Abort) and not isinstance(error.__context__, KeyboardInterrupt):
            # At the end of standard input, click raises the Abort while it handles an EOFError.
            is_end = isinstance(error.__cause__ or error.__context__, EOFError)
            how = " (without a terminal, give --yes)" if is_end else ""
            click.echo(f"onceflow: not confirmed, nothing was done{how}", err=True)
            sys.exit(1)
        if isinstance(pressed := error.__cause__ or error, CommitInterruptedError):  # click raises an Abort from it
            click.echo(f"onceflow: {pressed}", err=True)
        click.echo("onceflow: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except SystemExit:
        if _is_read_by_nobody():  # click ends with 1 then
            sys.exit(_BROKEN_PIPE)
        raise
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and (odd := _not_utf8(arguments)):
            click.echo(f"onceflow: the argument {odd!r} is not UTF-8\n  next step: give it in UTF-8", err=True)
            sys.exit(2)
        if isinstance(error, OSError) and error.errno in _NO_OUTPUT and error.filename is None:
            _cannot_write(error)
            sys.exit(errors.exit_code)
        if errors.exit_code == FINDING:
            raise  # Python ends with 1
        traceback.print_exc()
        sys.exit(errors.exit_code)
    try:
        with contextlib.suppress(BrokenPipeError, AttributeError):  # there may be no standard output at all
            sys.stdout.flush()
    except OSError as error:
        _cannot_write(error)
        sys.exit(errors.exit_code)
    if _is_read_by_nobody():
        sys.exit(_BROKEN_PIPE)
    sys.exit(result if isinstance(result, int) else 0)


def _not_utf8(arguments: Sequence[str] | None) -> str:
    """The first argument with bytes that are not UTF-8, for which Python has surrogates. Keys and separators may be
    such, so this is asked when an argument could not be encoded."""
    given = sys.argv[1:] if arguments is None else arguments
    return next((each for each in given if any("\udc80" <= c <= "\udcff" for c in each)), "")


def _cannot_write(error: OSError) -> None:
    """Say that the result cannot be written. What is left of it is dropped: Python would try it again at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    click.echo(f"onceflow: standard output cannot be written: {error.strerror}", err=True)


def _print_anything() -> None:
    """What the encoding of the terminal does not have is printed as ``?``: a value of a record may be any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_read_by_nobody() -> bool:
    """Whether the program that has read the output has ended, as ``head`` does. What is left of it is dropped then:
    Python would complain when it flushes the output at its end."""
    try:
        number = sys.stdout.fileno()
        waiting = select.poll()
        waiting.register(number, 0)
        is_gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in waiting.poll(0))
    except (AttributeError, OSError, ValueError):  # it is no file, or is closed
        return False
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return is_gone


if __name__ == "__main__":
    main()
