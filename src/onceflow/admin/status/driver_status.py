"""What running drivers say of their flows: asked over HTTP at their metrics ports, and checked."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from onceflow.errors import OptionError

PATH = "/status"
_BYTES_MAX = 8_000_000
_PART_BYTES = 65_536


@dataclass(frozen=True)
class DriverTable:
    """A table as the driver of its flow knows it, see `onceflow.state.table_facts.TableFacts`."""

    table: str
    partitions: int
    opened: int
    rows: Mapping[str, int]
    nbytes: int | None
    next_timer_ms: Mapping[str, int | None]
    restored: int
    restore_seconds: float
    waiting_letters: bool
    copies: Mapping[str, int] | None = None


@dataclass(frozen=True)
class LastBatch:
    """The last batch of a run.

    Args:
        records: written to the outputs.
        ran_in: ``driver``, ``4 tasks``, or ``2 + 4 tasks`` for two stages.
        read: offsets of the sources; None: an older version of onceflow does not say it.
    """

    records: int
    attempts: int
    seconds: float
    ran_in: str
    read: int | None = None


@dataclass(frozen=True)
class DriverStatus:
    """A flow as its driver knows it.

    Args:
        endpoint: which one has said it. host, pid: of the driver's process.
        condition: ``starting``, ``running``, ``stopped`` or ``failed``.
        since_ms: when the query was started, epoch milliseconds.
        batch, producer_id, producer_epoch: of the last committed batch; 0 and -1 before the first one.
        failure: class of the error that has ended the query.
        lag: offsets that were left to read at the last batch; None: it does not run.
        counts: what was counted since the endpoint was opened.
    """

    endpoint: str
    version: str
    host: str
    pid: int
    flow: str
    condition: str
    since_ms: int
    guarantee: str
    batch: int
    producer_id: int
    producer_epoch: int
    failure: str | None
    lag: int | None
    last_batch: LastBatch | None
    counts: Mapping[str, int]
    tables: Sequence[DriverTable] = field(default_factory=list)


def checked_endpoint(text: str) -> str:
    """The address of a driver's metrics port, without a path.

    Raises:
        OptionError: it is no such address.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        named = parts.username is not None or parts.password is not None
    except ValueError:
        usable = named = False
    if named:  # its text is not shown: it may have a password
        raise OptionError(
            "The address of an endpoint has a user name or a password", next_step="leave them out: there is no login"
        )
    if not usable:
        raise OptionError(
            f"{text} is no address of an endpoint", next_step="give scheme, host and port: http://driver-host:9404"
        )
    return f"{parts.scheme}://{parts.netloc}"


def ask_endpoint(endpoint: str, timeout_s: float) -> tuple[list[DriverStatus], str]:
    """The flows of a driver; and what is wrong, if it does not answer or is no driver of onceflow."""
    try:
        document = json.loads(_read(endpoint + PATH, timeout_s))
    except (OSError, urllib.error.URLError) as silent:
        if isinstance(silent, urllib.error.HTTPError):
            with silent:
                return (
                    [],
                    f"{endpoint} is no endpoint of onceflow, or of an older version: {PATH} answers {silent.code}",
                )
        return [], f"{endpoint} does not answer: {getattr(silent, 'reason', silent)}"
    except (ValueError, RecursionError, HTTPException) as unreadable:
        return [], f"{endpoint} is no endpoint of onceflow: its answer cannot be read ({unreadable})"
    try:
        if not isinstance(document, dict) or document.get("service") != "onceflow":
            raise ValueError("it does not say that it is one")
        who = {name: _take(document, name, kind) for name, kind in (("version", str), ("host", str), ("pid", int))}
        return [_flow(each, endpoint, who) for each in _take(document, "flows", list)], ""
    except ValueError as wrong:
        return [], f"{endpoint} is no endpoint of onceflow: {wrong}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An endpoint does not send its client elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _read(url: str, timeout_s: float) -> bytes:
    """The body of an answer. Proxies are not used."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
    until, body = time.monotonic() + timeout_s, b""
    with opener.open(url, timeout=timeout_s) as answer:
        while part := answer.read1(_PART_BYTES):
            body += part
            if len(body) > _BYTES_MAX:
                raise ValueError(f"more than {_BYTES_MAX:,} bytes")
            if time.monotonic() > until:
                raise TimeoutError("timed out")
    return body


def _take(content: Mapping[str, Any], name: str, kind: type, *, may_lack: bool = False) -> Any:
    found = content.get(name)
    if found is None and may_lack:
        return None
    good = isinstance(found, (int, float) if kind is float else kind) and not (kind is int and isinstance(found, bool))
    if not good:
        raise ValueError(f"{name} is {found!r:.50}")
    return found


def _flow(content: Any, endpoint: str, who: Mapping[str, Any]) -> DriverStatus:
    if not isinstance(content, dict):
        raise ValueError("a flow is no object")
    last = _take(content, "last_batch", dict, may_lack=True)
    numbers = ("since_ms", "batch", "producer_id", "producer_epoch")
    return DriverStatus(
        endpoint=endpoint,
        **who,
        **{name: _take(content, name, str) for name in ("flow", "condition", "guarantee")},
        **{name: _take(content, name, int) for name in numbers},
        failure=_take(content, "failure", str, may_lack=True),
        lag=_take(content, "lag", int, may_lack=True),
        last_batch=None
        if last is None
        else LastBatch(
            _take(last, "records", int),
            _take(last, "attempts", int),
            _take(last, "seconds", float),
            _take(last, "ran_in", str),
            _take(last, "read", int, may_lack=True),
        ),
        counts=_numbers(content, "counts"),
        tables=[_table(each) for each in _take(content, "tables", list)],
    )


def _table(content: Any) -> DriverTable:
    if not isinstance(content, dict):
        raise ValueError("a table is no object")
    return DriverTable(
        _take(content, "table", str),
        _take(content, "partitions", int),
        _take(content, "opened", int),
        _numbers(content, "rows"),
        _take(content, "nbytes", int, may_lack=True),
        _numbers(content, "next_timer_ms", may_lack=True),
        _take(content, "restored", int),
        _take(content, "restore_seconds", float),
        _take(content, "waiting_letters", bool),
        _numbers(content, "copies") if _take(content, "copies", dict, may_lack=True) is not None else None,
    )


def _numbers(content: Mapping[str, Any], name: str, *, may_lack: bool = False) -> dict[str, Any]:
    found = _take(content, name, dict)
    return {key: _take(found, key, int, may_lack=may_lack) for key in found}
