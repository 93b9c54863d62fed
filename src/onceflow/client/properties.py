"""A file of connection options in the properties format of Kafka's Java clients, as Kafka's own tools take it.

Such a file may be shared with other clients, so it may also hold what onceflow does not use: settings of producers
and consumers. They are left out, and named. What concerns security is never left out: a name that is not known there
is refused by `ClientSettings`, because a connection without it would not be the one that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import javaproperties

from onceflow.client.settings import uses
from onceflow.errors import OptionError

_SECURITY = ("security.", "sasl.", "ssl.", "https.")


@dataclass(frozen=True)
class Properties:
    """What a file says about connections. Its ``repr`` shows no option values.

    Attributes:
        bootstrap_servers: its ``bootstrap.servers``; None if it has none.
        options: the connection options, for `ClientSettings`.
        unused: names of settings that onceflow does not use, sorted.
    """

    bootstrap_servers: str | None
    options: dict[str, str]
    unused: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Properties({self.bootstrap_servers!r}, options=<{', '.join(sorted(self.options))}>)"


def read_properties(path: str | Path) -> Properties:
    """The connection options in a file of properties. Raises: OptionError: as `load_properties`."""
    given = load_properties(path)
    servers = given.pop("bootstrap.servers", "").strip() or None
    # The Java client trims values of security.protocol and the like, too (ConfigDef.parseType).
    options = {name: value.strip() for name, value in given.items() if uses(name) or name.startswith(_SECURITY)}
    return Properties(servers, options, tuple(sorted(set(given) - set(options))))


def load_properties(path: str | Path) -> dict[str, str]:
    """Read a file in the format of ``java.util.Properties``; like there, its bytes are ISO 8859-1 with ``\\u`` escapes.

    Raises:
        OptionError: the file cannot be read, or an escape in it is wrong.
    """
    try:
        with Path(path).open("rb") as file:
            return dict(javaproperties.load(file))
    except OSError as error:
        raise OptionError(
            f"the configuration {str(path)!r} cannot be read: {error.strerror or error}",
            next_step="give the path of a file in the properties format of Kafka's Java clients",
        ) from error
    except javaproperties.InvalidUEscapeError as error:  # a ValueError that shows the escape, never the whole value
        raise OptionError(
            f"the configuration {str(path)!r} has a wrong escape: a backslash and u without four hexadecimal digits",
            next_step="write a backslash as \\\\ (two of them)",
        ) from error
