"""Which cluster a command talks to, and how: the options that these commands share."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from onceflow.errors import OptionError

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline
    from onceflow.client.settings import ClientSettings

VARIABLE = "ONCEFLOW_BOOTSTRAP_SERVERS"
CONFIG_VARIABLE = "ONCEFLOW_CONFIG"
LAST_RESORT = "localhost:9092"
_CALL_S = 60.0


def connection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of connections; it is called with ``settings``, a `ClientSettings`."""

    @connection_options
    @functools.wraps(command)
    def with_settings(
        *arguments: Any,
        bootstrap_servers: str | None,
        options: tuple[str, ...],
        config_file: str | None,
        **named: Any,
    ) -> Any:
        return command(*arguments, settings=settings_of(bootstrap_servers, options, config_file), **named)

    return with_settings


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same options; the command has ``bootstrap_servers``, ``options`` and ``config_file``, for `settings_of`."""
    servers = click.option(
        "--bootstrap-servers",
        help=f"host:port of brokers, separated by commas.  [default: bootstrap.servers of --command-config, else "
        f"${VARIABLE}, else the broker that `onceflow broker start` runs in its default folder, else {LAST_RESORT}]",
    )
    option = click.option(
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A connection option under its name in Kafka's Java clients; may be repeated.",
    )
    # Kafka's own tools have --command-config everywhere, and --config for settings of topics.
    taken = any("--config" in parameter.opts for parameter in getattr(command, "__click_params__", ()))
    file = click.option(
        *(("--command-config",) if taken else ("--command-config", "--config")),
        "config_file",
        metavar="FILE",
        help="Connection options in a file in the properties format of Kafka's Java clients; --option goes before "
        f"it.  [default: ${CONFIG_VARIABLE}]",
    )
    return servers(option(file(command)))


def settings_of(
    bootstrap_servers: str | None,
    options: tuple[str, ...],
    config_file: str | None = None,
    *,
    even_stopped: bool = False,
) -> ClientSettings:
    """The settings of a connection, from the values of the options.

    Settings in the file that onceflow does not use are named on stderr.

    Args:
        even_stopped: as of `default_servers`.

    Raises:
        OptionError: the file cannot be read, or an option is unknown or wrong.
    """
    from onceflow.client.properties import Properties, read_properties
    from onceflow.client.settings import ClientSettings

    path = config_file or os.environ.get(CONFIG_VARIABLE, "").strip()
    file = read_properties(path) if path else Properties(None, {}, ())
    if file.unused:
        click.echo(f"{path}: not used by onceflow: {', '.join(file.unused)}", err=True)
    values = {**file.options, **pairs(options, "--option")}
    given = bootstrap_servers or file.bootstrap_servers
    if given is None:
        ClientSettings(LAST_RESORT, values)  # what is wrong in the options does not depend on the cluster
    return ClientSettings(given or default_servers(even_stopped=even_stopped), values)


@contextlib.contextmanager
def connected(settings: ClientSettings, what: str) -> Iterator[tuple[Cluster, Deadline]]:
    """Connections for one command, and its deadline of a minute.

    Args:
        what: what the command does, for the error when the deadline is over.
    """
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline

    with contextlib.closing(Cluster(settings)) as cluster:
        yield cluster, Deadline(_CALL_S, what)


def default_servers(*, even_stopped: bool = False) -> str:
    """The bootstrap servers when none are given: of the environment, of the local broker, or Kafka's usual address.

    Args:
        even_stopped: the local broker need not run: the command only looks, and knows more than what Kafka says.

    Raises:
        OptionError: there is a local broker, and it is stopped. What listens at Kafka's usual address is another
            cluster then, perhaps somebody else's.
    """
    from onceflow.broker import process
    from onceflow.broker.folder import Folder, default_data_dir

    given = os.environ.get(VARIABLE, "").strip()
    if given:
        return given
    local = Folder(default_data_dir()).read()
    if local is None:
        return LAST_RESORT
    if not even_stopped and not any(process.running(node) for node in local.nodes):
        raise OptionError(
            f"The local broker ({local.bootstrap_servers}) is stopped",
            next_step="start it: `onceflow broker start`; or name another cluster with --bootstrap-servers or "
            f"${VARIABLE}",
        )
    return local.bootstrap_servers


def pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """Values by name, of several ``NAME=VALUE``. See `pair`."""
    found: dict[str, str] = {}
    for text in texts:
        name, value = pair(text, option)
        if name in found:
            raise click.UsageError(f"{option} names {name!r} twice")
        found[name] = value
    return found


def pair(text: str, option: str) -> tuple[str, str]:
    """Name and value of ``NAME=VALUE``.

    Args:
        option: the name of the command's option, for the error.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise click.UsageError(f"{option} {text!r} is not of the form NAME=VALUE")
    return name, value
