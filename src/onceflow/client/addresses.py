"""Addresses of brokers: parsing them, and probing whether somebody accepts connections there."""

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
# Java clients take the protocol of a listener before an address, and leave it out.
_SCHEME = re.compile(r"^[^/]*://")
# Answers that come at once and mean that no broker listens there. Silence may be that of a slow or frozen one.
_REFUSALS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL})


@dataclass(frozen=True)
class Address:
    """Where a broker listens; an IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Contact:
    """What a plain connection to an address met.

    Args:
        refused: nobody listens there, the host cannot be reached, or its name does not resolve.
        text: the same in words; empty when the connection was taken.
    """

    refused: bool
    text: str


def parse_servers(servers: Any) -> list[Address]:
    """The addresses in ``host:port,host:port``.

    Raises:
        OptionError: it is empty, no text, or an address has no host or no port.
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
    """Connect, and close the connection again."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_S):
            return Contact(False, "")
    except socket.gaierror as error:
        return Contact(True, f"the name {address.host} does not resolve: {error.strerror}")
    except OSError as error:
        return Contact(error.errno in _REFUSALS, str(error))
    except UnicodeError:  # what the codec of host names says of a label that is empty or too long
        return Contact(True, f"{address.host} is no host name")


def _parse(text: str) -> Address:
    if len(text.split()) > 1:
        raise OptionError(f"bootstrap_servers: {text!r} has spaces in it", next_step=f"write {','.join(text.split())}")
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
    if not port:
        raise OptionError(f"bootstrap_servers: {shown} has no port", next_step=f"write {shown}:9092")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT):
        raise OptionError(
            f"bootstrap_servers: {port!r} in {text} is no port",
            next_step=f"write a number from 1 to {_MAX_PORT}, for example {shown}:9092",
        )
    return Address(host, int(port))
