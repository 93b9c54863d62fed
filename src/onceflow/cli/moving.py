"""What commands share that change where a flow is: `onceflow reset`, `progress import`, `fork` and `promote`.

They have the same options, and do the same steps: they show what they would do, ask, do it in one transaction, and
print the result.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import click

from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.text import confirm

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster
    from onceflow.client.settings import ClientSettings
    from onceflow.protocol.names import Names
    from onceflow.protocol.progress import Progress

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """The values of the options that these commands share."""

    dry_run: bool
    transactional_id_prefix: str
    group_id_prefix: str | None
    yes: bool
    as_json: bool

    def names(self, flow: str) -> Names:
        """The names of a flow in Kafka."""
        from onceflow.protocol.names import Names

        return Names(flow, self.transactional_id_prefix, self.group_id_prefix)


def moving_options(*, dry_run: str, prefixes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that these commands share; it is called with ``options``, an `Options`.

    Args:
        dry_run, prefixes: the help of these options.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option("--dry-run", is_flag=True, help=dry_run)
        @click.option("--transactional-id-prefix", default="", help=prefixes)
        @click.option("--group-id-prefix", help=prefixes)
        @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
        @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
        @functools.wraps(command)
        def with_options(
            *arguments: Any,
            dry_run: bool,
            transactional_id_prefix: str,
            group_id_prefix: str | None,
            yes: bool,
            as_json: bool,
            **named: Any,
        ) -> Any:
            options = Options(dry_run, transactional_id_prefix, group_id_prefix, yes, as_json)
            return command(*arguments, options=options, **named)

        return with_options

    return add


class Found(Protocol):
    """What such a command would do, or has done."""

    @property
    def progress(self) -> Progress | None:
        """What was committed. None: nothing yet."""
        ...


_FoundT = TypeVar("_FoundT", bound=Found)


@dataclass(frozen=True)
class Texts(Generic[_FoundT]):
    """What a command says.

    Args:
        plan: what would be done, line by line. question: whether to do it.
        done: what was done, line by line. content: either of both, for JSON.
    """

    plan: Callable[[_FoundT], list[str]]
    question: Callable[[_FoundT], str]
    done: Callable[[_FoundT], list[str]]
    content: Callable[[_FoundT], dict[str, Any]]

    def tell(self, found: _FoundT, *, as_json: bool) -> None:
        """Print what would be done, or was."""
        if as_json:
            click.echo(json.dumps(self.content(found)))
        else:
            click.echo("\n".join(self.plan(found) if found.progress is None else self.done(found)))

    def ask(self, planned: _FoundT, options: Options, servers: str) -> None:
        """Show what would be done, and ask.

        Args:
            servers: of the cluster.

        Raises:
            click.Abort: it is not confirmed.
        """
        if not (options.yes and options.as_json):
            click.echo("\n".join(self.plan(planned)), err=True)
        if not options.yes:
            click.echo(f"Cluster: {servers}", err=True)
            confirm(self.question(planned))


def carry_out(
    settings: ClientSettings,
    options: Options,
    texts: Texts[_FoundT],
    preview: Callable[[Cluster], _FoundT],
    act: Callable[[Cluster, Tell], _FoundT],
) -> None:
    """Look, ask, act, and print the result. With --dry-run, or if it is done already, only look and print.

    Args:
        preview: finds out what would be done. Its progress is None unless it is done already.
        act: does it. It tells how far it is, and is interrupted there by Ctrl-C.
    """
    from onceflow.client.cluster import Cluster

    with contextlib.closing(Cluster(settings)) as cluster:
        found = preview(cluster)
        if found.progress is None and not options.dry_run:
            texts.ask(found, options, settings.bootstrap_servers)
            with telling() as tell:
                found = act(cluster, tell)
        texts.tell(found, as_json=options.as_json)


@contextlib.contextmanager
def telling() -> Iterator[Tell]:
    """Shows how far it is. Ctrl-C ends it: the transaction is aborted."""
    with progress_bar() as bar, interruptible() as check:

        def tell(text: str, done: int, total: int) -> None:
            check()
            bar(text, done, total)

        yield tell
