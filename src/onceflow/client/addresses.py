"""Addresses of brokers: parses them, and tests whether a server accepts TCP connections there."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass
from typing import Any

from onceflow.errors import OptionError

_EXAMPLE = "localhost:9092"
_MAX_PORT = 65_535
_CONNECT_S = 2.0
# Java clients accept the protocol of a listener in front of an address (``PLAINTEXT://host:9092``), and ignore it.
_SCHEME = re.compile(r"^[^/]*://")
# These errors come at once and mean that no broker listens there. A timeout is no proof: the broker may be slow or
# frozen.
_REFUSALS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL})


@dataclass(frozen=True)
class Address:
    """Where a broker listens. An IPv6 address is stored without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Contact:
    """The result of a TCP connection to an address.

    Args:
        refused: no process listens there, the host cannot be reached, or its name does not resolve.
        text: the reason in words; empty if the connection was accepted.
    """

    refused: bool
    text: str


def parse_servers(servers: Any) -> list[Address]:
    """The addresses in ``host:port,host:port``.

    Raises:
        OptionError: the value is empty or not a string, or an address lacks its host or port.
    """
    if servers and not isinstance(servers, str):
        raise OptionError(
            f"bootstrap_servers is of type {type(servers).__name__}, not a string",
            next_step='separate several servers by commas: bootstrap_servers="broker-1:9092,broker-2:9092"',
        )
    written = [part.strip() for part in (servers or "").split(",") if part.strip()]
    if not written:
        raise OptionError("bootstrap_servers is empty", next_step=f'give for example bootstrap_servers="{_EXAMPLE}"')
    return [_parse(text) for text in written]


def contact(address: Address) -> Contact:
    """Open a TCP connection and close it again."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_S):
            return Contact(False, "")
    except socket.gaierror as error:
        return Contact(True, f"the name {address.host} does not resolve: {error.strerror}")
    except OSError as error:
        return Contact(error.errno in _REFUSALS, str(error))
    except UnicodeError:  # raised by the codec of host names: a label is empty or too long
        return Contact(True, f"{address.host} is no host name")


def is_host_name(host: str) -> bool:
    """Whether the codec of host names takes this. If not, a look-up raises UnicodeError, not OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _parse(text: str) -> Address:
    if len(text.split()) > 1:
        raise OptionError(f"bootstrap_servers: {text!r} contains spaces", next_step=f"write {','.join(text.split())}")
    bare = _SCHEME.sub("", text)
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", bare)
    if bracketed:
        host, port = bracketed[1], bracketed[2] or ""
        shown = f"[{host}]"
    else:
        host, _, port = bare.rpartition(":") if ":" in bare else (bare, "", "")
        shown = host
        if ":" in host:
            raise OptionError(
                f"bootstrap_servers: {text} has more than one colon",
                next_step=f"write an IPv6 address in brackets, for example [{host}]:{port or 9092}",
            )
    if not host:
        raise OptionError(f"bootstrap_servers: {text} has no host", next_step=f"write for example {_EXAMPLE}")
    if not is_host_name(host):
        raise OptionError(
            f"bootstrap_servers: {host!r} is no host name",
            next_step="between its dots it has 1 to 63 characters, such as in kafka-1.internal:9092",
        )
    if not port:
        raise OptionError(f"bootstrap_servers: {shown} has no port", next_step=f"write {shown}:9092")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT):
        raise OptionError(
            f"bootstrap_servers: {port!r} in {text} is no port",
            next_step=f"write a number from 1 to {_MAX_PORT}, for example {shown}:9092",
        )
    return Address(host, int(port))
