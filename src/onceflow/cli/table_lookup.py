"""``onceflow table get``, ``range``, ``prefix``, ``count`` and ``tail``: what is in a table, and how it changes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connected, connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible, until_interrupted
from onceflow.cli.progress import progress_bar
from onceflow.cli.table_cells import Cells, cells
from onceflow.cli.text import timeout_ms
from onceflow.errors import counted
from onceflow.state.api import serdes

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings
    from onceflow.tables.lag import Restore
    from onceflow.tables.table import Change, Table

_LINES = 1000  # one write for many lines
_WAITING, _LOOK_S = 10_000, 0.2
_CONNECT_S = 15.0  # as long as the other commands wait

limit = click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N lines.")
reverse = click.option("--reverse", is_flag=True, help="The last key first.")


@contextlib.contextmanager
def naming_state_dir(state_dir: Path | None) -> Iterator[None]:
    """Let an error about the folder of the copies name the option, if that has named the folder."""
    from onceflow.errors import EnvironmentUnusableError

    try:
        yield
    except EnvironmentUnusableError as error:
        if state_dir is None or str(state_dir) not in error.what:
            raise
        next_step = f"make --state-dir {state_dir} writable and its disk large enough, or give another folder there"
        raise EnvironmentUnusableError(error.what, **{**error.fields(), "next_step": next_step}) from error


@dataclass(frozen=True)
class Opener:
    """Opens the table of a command, as its options say."""

    settings: ClientSettings
    partitions: tuple[int, ...]
    timeout_s: float
    state_dir: Path | None

    @contextlib.contextmanager
    def opened(self, topic: str, key: Any = serdes.BYTES) -> Iterator[tuple[Table, Callable[[], None]]]:
        """The table, current, and a function that raises KeyboardInterrupt if Ctrl-C was pressed.

        Args:
            key: serde of its keys.

        Raises:
            OnceflowError: as `Table.start`.
        """
        from onceflow.errors import DeadlineExceededError
        from onceflow.tables.table import Table

        table = Table(
            topic,
            bootstrap_servers=self.settings.bootstrap_servers,
            options=self.settings.options,
            key=key,
            partitions=self.partitions or None,
            state_dir=self.state_dir,
            restore_timeout=f"{self.timeout_s} seconds",
            connect_timeout=f"{min(self.timeout_s, _CONNECT_S)} seconds",
        )
        with interruptible() as check:
            try:
                with progress_bar() as show:

                    def tell(restore: Restore) -> None:
                        check()
                        show(f"reading {topic}", restore.done, restore.total)

                    with naming_state_dir(self.state_dir):
                        table.start(progress=tell)
                    check()
                yield table, check
                if table.ignored:
                    click.echo(f"{counted(table.ignored)} left out: without a key", err=True)
            except DeadlineExceededError as error:
                if "restore_timeout" not in error.next_step:
                    raise
                fields = {**error.fields(), "next_step": "run it again with a longer --timeout; it continues there"}
                raise DeadlineExceededError(error.what, **fields) from None
            finally:
                table.close()


def reads_table(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options for opening a table; it is called with ``opener``."""

    @connection
    @click.option(
        "--partition",
        "partitions",
        type=click.IntRange(min=0),
        multiple=True,
        metavar="N",
        help="Look into this partition only; may be repeated.  [default: all]",
    )
    @click.option(
        "--timeout",
        default="5 minutes",
        show_default=True,
        metavar="DURATION",
        help="How long reading the topic into the local copy may take.",
    )
    @click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for the local copy.  [default: $ONCEFLOW_STATE_DIR, else ~/.local/state/onceflow]",
    )
    @functools.wraps(command)
    def with_opener(
        *arguments: Any,
        settings: ClientSettings,
        partitions: tuple[int, ...],
        timeout: str,
        state_dir: Path | None,
        **named: Any,
    ) -> Any:
        timeout_s = timeout_ms(timeout, "--timeout") / 1000
        return command(*arguments, opener=Opener(settings, partitions, timeout_s, state_dir), **named)

    return with_opener


class _KeysCommand(click.Command):
    """Says how negative numbers are given as keys. They are not guessed: -5 could be a misspelled option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not re.fullmatch("-[0-9]", error.option_name):
                raise
            raise click.UsageError(
                "A key that begins with a dash goes behind --, after all options: "
                "`onceflow table get TOPIC --key long -- 42 -5`",
                ctx,
            ) from None


@examples("onceflow table get balances ada bob", "onceflow table get orders --key long -- 42 -5")
@click.command(cls=_KeysCommand)
@click.argument("topic")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@cells
@reads_table
@click.pass_context
def get(ctx: click.Context, topic: str, keys: tuple[str, ...], cells: Cells, opener: Opener) -> None:
    """Print keys of the table in TOPIC with their values: key, tab, value.

    The exit code is 1 if one of the keys does not exist.

    The topic is read into a local copy, which stays in the state folder: the next call reads only what is new.

    A key that begins with a dash, such as a negative number, goes behind --, after all options:
    `onceflow table get TOPIC --key long -- 42 -5`.
    """
    wanted = {cells.key(key): key for key in keys}
    with opener.opened(topic, serdes.JSON if cells.keys_are_json else serdes.BYTES) as (table, _):
        if cells.keys_are_json:  # the same value in other bytes is the same key
            values = {key: table.get(serdes.JSON.decode(key)) for key in wanted}
            found = {key: value for key, value in values.items() if value is not None}
        else:
            found = table.multi_get([*wanted])
        _print(cells.row(key, value) for key, value in found.items())
    missing = [text for key, text in wanted.items() if key not in found]
    for text in missing:
        click.echo(f"Table {topic} has no key {text!r}.", err=True)
    if missing:
        ctx.exit(1)


@examples("onceflow table range balances --start a --end n --limit 10")
@click.command(name="range")
@click.argument("topic")
@click.option("--start", metavar="KEY", help="The first key.  [default: the first one of the table]")
@click.option("--end", metavar="KEY", help="The key to stop before.  [default: none]")
@reverse
@limit
@cells
@reads_table
def range_(
    topic: str,
    start: str | None,
    end: str | None,
    reverse: bool,
    limit: int | None,
    cells: Cells,
    opener: Opener,
) -> None:
    """Print the keys from --start up to, but without, --end, with their values.

    They come in the order of the keys' bytes. In it, negative numbers of --key long come after positive ones.
    """
    low, high = cells.bounds(start, end)
    with opener.opened(topic) as (table, check):
        pairs = itertools.islice(table.range(low, high, reverse=reverse), limit)
        _print((cells.row(key, value) for key, value in pairs), check)


@examples("onceflow table prefix balances customer-17 --reverse")
@click.command()
@click.argument("topic")
@click.argument("prefix")
@reverse
@limit
@cells
@reads_table
def prefix(topic: str, prefix: str, reverse: bool, limit: int | None, cells: Cells, opener: Opener) -> None:
    """Print the keys that begin with PREFIX, with their values, in the order of the keys' bytes.

    With --key json, PREFIX is the beginning of a key's text, for example '{"id":1'.
    """
    beginning = cells.prefix(prefix)
    with opener.opened(topic) as (table, check):
        pairs = itertools.islice(table.prefix(beginning, reverse=reverse), limit)
        _print((cells.row(key, value) for key, value in pairs), check)


@examples("onceflow table count balances")
@click.command()
@click.argument("topic")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reads_table
def count(topic: str, as_json: bool, opener: Opener) -> None:
    """Print how many keys the table in TOPIC has.

    Entries of maps and lists, and timers, do not count: `onceflow status FLOW --tables` counts them.
    """
    with opener.opened(topic) as (table, _):
        found = table.count()
    click.echo(json.dumps({"table": topic, "count": found}) if as_json else found)
    if not found:
        _tell_companion(opener.settings, topic)


def _tell_companion(settings: ClientSettings, topic: str) -> None:
    """A table without rows may have maps and timers, as that of windows has."""
    from onceflow.admin.records.tables import companion_records
    from onceflow.protocol.names import INTERNAL_SUFFIX

    with connected(settings, f"looking for the companion topic of {topic}") as (cluster, deadline):
        records = companion_records(cluster, topic, deadline)
    if records:
        click.echo(
            f"{topic}{INTERNAL_SUFFIX} has at most {counted(records)}: entries of maps and lists, and timers. "
            "`onceflow status FLOW --tables` counts them.",
            err=True,
        )


@examples("onceflow table tail balances --json")
@click.command()
@click.argument("topic")
@click.option("--from-start", is_flag=True, help="First print the rows that are there.")
@limit
@cells
@reads_table
def tail(topic: str, from_start: bool, limit: int | None, cells: Cells, opener: Opener) -> None:
    """Print changes of the table in TOPIC as they are committed, until Ctrl-C: key, tab, value. A deleted key has null.

    With --json there is also the value before, and where the record is; "deleted" is true if the key was deleted. A
    change that is committed while --from-start prints the rows may be printed twice.
    """
    with opener.opened(topic) as (table, check), _changes(table, check) as changes, until_interrupted():
        click.echo(f"Following {topic}, {counted(table.count(), 'key')}. Ctrl-C ends it.", err=True)
        rows = ([cells.row(key, value)] for key, value in (table.items() if from_start else ()))
        new = ([cells.change(change) for change in some] for some in changes)
        left = limit
        for lines in itertools.chain(rows, new):
            lines = lines[:left]
            click.echo("\n".join(lines))
            left = None if left is None else left - len(lines)
            if left == 0:
                return


@contextlib.contextmanager
def _changes(table: Table, check: Callable[[], None]) -> Iterator[Iterator[list[Change]]]:
    """What changes from now on, without end. When the reader is slow, the table waits for it."""
    arrived: queue.Queue[Change] = queue.Queue(_WAITING)
    over = threading.Event()

    def take(change: Change) -> None:
        while not over.is_set():
            try:
                arrived.put(change, timeout=_LOOK_S)
            except queue.Full:
                continue
            return

    def changes() -> Iterator[list[Change]]:
        while True:
            check()
            try:
                some = [arrived.get(timeout=_LOOK_S)]
            except queue.Empty:
                table.get(b"")  # raises the error that has stopped the table, if there is one
                continue
            with contextlib.suppress(queue.Empty):
                while len(some) < _LINES:
                    some.append(arrived.get_nowait())
            yield some

    end = table.on_change(take)
    try:
        yield changes()
    finally:
        over.set()
        end()


def _print(lines: Iterable[str], check: Callable[[], None] = lambda: None) -> None:
    waiting = iter(lines)
    while some := [*itertools.islice(waiting, _LINES)]:
        check()
        click.echo("\n".join(some))
