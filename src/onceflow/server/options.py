"""What a query server is started with."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError
from onceflow.server.formats import Format
from onceflow.server.peer_auth import PeerSecrets

_TOKEN_MIN = 16


@dataclass(frozen=True)
class Limits:
    """What one server accepts.

    Args:
        body_bytes: size of a request's body.
        keys: of one multi-get.
        answer_bytes: size of the rows of one multi-get, and of one answer to another instance; one row always fits.
        lookups: keys times partitions in which they are looked for, of one request.
        rows: of one range that is not streamed.
        requests: that are answered at the same time; more get 503.
        streams: streamed ranges and changes at the same time; more get 503.
        connections: open at the same time; more get 503.
        request_s: time until an answer begins, also the longest time that a request may wait for a position.
        wait_s: how long a request waits for a position or for freshness if it does not say so.
        stream_s: length of a streamed range or of changes; then it ends with a cursor.
        stall_s: how long a client may take to read what is sent to it, or to send the head of a request.
        stop_s: how long running requests may take when the server is stopped.
    """

    body_bytes: int = 1 << 20
    keys: int = 1_000
    answer_bytes: int = 8 << 20
    lookups: int = 50_000
    rows: int = 10_000
    requests: int = 1_000
    streams: int = 64
    connections: int = 4_096
    request_s: float = 30.0
    wait_s: float = 5.0
    stream_s: float = 600.0
    stall_s: float = 30.0
    stop_s: float = 10.0


@dataclass(frozen=True)
class ServeOptions:
    """The arguments of ``onceflow table serve``.

    Args:
        tables: topics and how their keys and values are written.
        host, port: where to listen; port 0: any free one.
        tokens: requests must carry one of them; empty: anybody may ask.
        certificate, certificate_key: PEM files; None: no TLS.
        instances: the consumer group that shares the tables; None: this is the only instance.
        peer_secrets: by which these instances recognise each other; the first one is used, all are accepted.
        advertise: the URL under which other instances reach this one; "": made of host and port.
        authority: PEM file of authorities that signed the certificates of other instances; None: those of the system.
        copies: how many instances have each partition.
        session_s: after how long without a sign of life an instance is replaced.
        store, state_dir: as for `Table`.
    """

    tables: dict[str, Format]
    settings: ClientSettings
    host: str = "127.0.0.1"
    port: int = 8790
    tokens: Sequence[str] = ()
    certificate: Path | None = None
    certificate_key: Path | None = None
    instances: str | None = None
    peer_secrets: Sequence[str] = ()
    advertise: str = ""
    authority: Path | None = None
    copies: int = 1
    session_s: float = 10.0
    store: str = "lmdb"
    state_dir: Path | None = None
    access_log: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.tables:
            raise OptionError("No table was given", next_step="give the names of compacted topics")
        for token in self.tokens:
            if len(token) < _TOKEN_MIN or not token.isascii() or not token.isprintable() or " " in token:
                raise OptionError(
                    f"A token is shorter than {_TOKEN_MIN} characters, or has characters that headers cannot have",
                    next_step="make one, for example: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        self._check_instances()
        self._check_tls()

    def _check_instances(self) -> None:
        alone = [
            name for name, given in (("--copies", self.copies > 1), ("--advertise", bool(self.advertise))) if given
        ]
        if self.instances is None and alone:
            raise OptionError(
                f"{alone[0]} is given, but there are no other instances",
                next_step="give all instances the same consumer group: --instances GROUP",
            )
        if self.advertise and not _is_url(self.advertise):
            raise OptionError(
                f"--advertise {self.advertise[:200]} is not the URL of an instance",
                next_step="give http://HOST:PORT or https://HOST:PORT",
            )
        if self.instances is not None and not self.advertise and self.host in ("0.0.0.0", "::", ""):
            raise OptionError(
                f"Other instances cannot reach {self.host or 'every address'}",
                next_step="say under which URL they reach this one: --advertise http://HOST:PORT",
            )
        if self.instances is not None:
            PeerSecrets(self.peer_secrets)
        if self.copies < 1:
            raise OptionError(f"--copies {self.copies}", next_step="give 1 or more")

    def _check_tls(self) -> None:
        """Files that cannot be used are found before the server listens."""
        try:
            if self.certificate is not None:
                # With a password that is wrong OpenSSL asks nobody for one.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.certificate_key, "")
        except (OSError, ValueError) as wrong:
            raise OptionError(
                f"The certificate {self.certificate} and its key {self.certificate_key} cannot be used",
                detail=str(wrong),
                next_step="give PEM files that belong together, the key without a password",
            ) from wrong
        try:
            if self.authority is not None:
                ssl.create_default_context(cafile=str(self.authority))
        except (OSError, ValueError) as wrong:
            raise OptionError(
                f"--tls-authority {self.authority} cannot be used",
                detail=str(wrong),
                next_step="give a PEM file with certificates",
            ) from wrong

    @property
    def secrets(self) -> PeerSecrets | None:
        """By what other instances are recognised; None: there are none."""
        return None if self.instances is None else PeerSecrets(self.peer_secrets)

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    @property
    def public(self) -> bool:
        """Whether other machines can reach it."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def url(self, port: int) -> str:
        """Under which URL others reach this instance, which listens on this port."""
        if self.advertise:
            return self.advertise.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{port}"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/") and not parts.query
        )
    except ValueError:
        return False
