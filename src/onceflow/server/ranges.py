"""Ranges as one JSON document, or streamed as lines of JSON (NDJSON)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from onceflow.server.formats import Format
from onceflow.server.local import PAGE_BYTES
from onceflow.server.merging import Rows
from onceflow.server.problems import Problem
from onceflow.server.requests import cursor_after
from onceflow.server.service import Served, Service
from onceflow.server.staleness import AnswerAge, Freshness
from onceflow.server.streams import LeasedStream

_ROWS = 100
_PAGE_ROWS = 1_000


@dataclass(frozen=True)
class Wanted:
    """A range that is asked for.

    Args:
        limit: rows; None: 100, or all if they are streamed.
    """

    low: bytes
    high: bytes | None
    reverse: bool
    limit: int | None
    freshness: Freshness
    format: Format


async def as_page(service: Service, served: Served, wanted: Wanted) -> Response:
    """The first rows as one document."""
    limit = _ROWS if wanted.limit is None else wanted.limit
    if limit > service.limits.rows:
        raise Problem(
            400,
            f"limit={limit:,} is more than {service.limits.rows:,}",
            next_step="continue with the cursor, or accept application/x-ndjson",
        )
    pages, seen = await _read(served, wanted, min(limit + 1, _PAGE_ROWS))
    found: Rows = []
    size = 0
    async for page in pages:
        for row in page:
            size += len(row[0]) + len(row[1])
            # One row more than wanted shows that there is more.
            if found and (len(found) == limit or size > PAGE_BYTES):
                return await _page(served, wanted, found, seen, more=True)
            found.append(row)
    return await _page(served, wanted, found, seen, more=False)


async def as_lines(service: Service, served: Served, wanted: Wanted) -> Response:
    """All rows, a line for each, and a last line with a cursor (null: that was all) and the position.

    A range that cannot be continued ends with a line that has ``error`` and the cursor to continue with.
    """
    lease = service.begin_stream()
    limit = _PAGE_ROWS if wanted.limit is None else wanted.limit
    try:
        pages, seen = await _read(served, wanted, min(limit, _PAGE_ROWS))
    except BaseException:
        lease.close()
        raise

    async def lines() -> AsyncIterator[bytes]:
        until = time.monotonic() + service.limits.stream_s
        count, last = 0, None
        ending: dict[str, Any] = {"cursor": None}
        try:
            async for page in pages:
                left = len(page) if wanted.limit is None else wanted.limit - count
                await wanted.format.learn(raw for _, raw in page[:left])
                yield b"".join(_line(wanted.format.item(*row)) for row in page[:left])
                count += min(left, len(page))
                last = page[:left][-1][0]
                if count == wanted.limit or service.stopping or time.monotonic() > until:
                    ending = {"cursor": cursor_after(last)}
                    break
        except Problem as problem:
            cursor = None if last is None else cursor_after(last)
            ending = {"cursor": cursor, "error": problem.document()}
        yield _line({**ending, "count": count, **seen.members(served.topic)})

    return LeasedStream(lease, lines(), seen.headers(served.topic), "application/x-ndjson")


async def _read(served: Served, wanted: Wanted, page_rows: int) -> tuple[AsyncIterator[Rows], AnswerAge]:
    high = wanted.high
    if high is not None and high <= wanted.low:
        high = wanted.low  # nothing
    return await served.routed.range(wanted.low, high, wanted.freshness, reverse=wanted.reverse, page_rows=page_rows)


async def _page(served: Served, wanted: Wanted, found: Rows, seen: AnswerAge, *, more: bool) -> Response:
    topic = served.topic
    await wanted.format.learn(raw for _, raw in found)
    listed = [wanted.format.item(*row) for row in found]
    cursor = cursor_after(found[-1][0]) if more else None
    document = {"table": topic, "rows": listed, "cursor": cursor, **seen.members(topic)}
    return Response(orjson.dumps(document), 200, seen.headers(topic), "application/json")


def _line(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
