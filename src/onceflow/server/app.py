"""The routes of the query server."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onceflow._version import __version__
from onceflow.errors import OnceflowError
from onceflow.server import documents
from onceflow.server.changes import changes_of
from onceflow.server.documents import responses
from onceflow.server.formats import Format
from onceflow.server.local import NotHereError
from onceflow.server.peers import not_here, peer_routes
from onceflow.server.problems import Problem, unavailable
from onceflow.server.ranges import Wanted, as_lines, as_page
from onceflow.server.requests import (
    KeyEncoding,
    MaxStaleness,
    MinPosition,
    ValueEncoding,
    Wait,
    cursor_of,
    key_in_path,
    text_key,
    wish_of,
)
from onceflow.server.seen import Seen, Wish
from onceflow.server.service import Served, Service
from onceflow.state import rows

log = logging.getLogger("onceflow.server")

_KEYS_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": documents.KeysDocument.model_json_schema()}},
    }
}
_LINES = {200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}}
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "id", "data")}}
_EVENTS = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def make_app(service: Service, at_end: Callable[[], Awaitable[None]]) -> FastAPI:
    """The application with all routes.

    Args:
        at_end: called when the server has stopped, in its event loop.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await at_end()

    app = FastAPI(title="onceflow tables", version=__version__, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(OnceflowError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(NotHereError, not_here)
    app.include_router(peer_routes(service))
    _add_state(app, service)
    _add_lookups(app, service)
    _add_range(app, service)
    _add_changes(app, service)
    return app


class ShortWay:
    """An ASGI application around that of FastAPI, which answers lookups of one key without parameters itself.

    FastAPI takes most of the time of such a request, only to find out that there are no parameters.
    """

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope.get("raw_path", b"").split(b"/", 4)
        topic = parts[2].decode() if len(parts) == 5 and parts[1] == b"tables" and parts[3] == b"keys" else None
        if topic not in self._service.tables or scope["query_string"] or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        wish = Wish(until=time.monotonic() + self._service.limits.wait_s)
        try:
            served = self._service.table(topic)
            response = await one_key(served, unquote_to_bytes(parts[4]), served.format, wish)
        except Problem as problem:
            response = problem.response()
        except OnceflowError as error:
            response = _failed_response(error)
        await response(scope, receive, send)


async def one_key(served: Served, path_key: bytes, written: Format, wish: Wish) -> Response:
    """The value of a key.

    Args:
        path_key: as it stands in the path, without percent-encoding.

    Raises:
        Problem: 400, the key is invalid; 404, there is none; 422, its value does not fit the format; 503, not now.
    """
    topic = served.topic
    key = written.keys.key(text_key(path_key))
    raw, seen = await served.routed.get(key, wish)
    found = {"table": topic, "key": written.keys.show(key), **seen.members(topic)}
    if raw is None:
        raise Problem(404, f"Table {topic} has no such key", headers=seen.headers(topic), more=found)
    value, error = written.value(raw)
    if error:
        next_step = "ask with value_encoding=base64"
        raise Problem(422, error, next_step=next_step, headers=seen.headers(topic), more=found)
    found["value"] = value
    return answer(found, topic, seen)


def answer(document: Any, topic: str, seen: Seen) -> Response:
    """A JSON document with the headers that say how old it is."""
    return Response(orjson.dumps(document), 200, seen.headers(topic), "application/json")


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=responses(documents.HealthDocument, aged=False), summary="Does it run?")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get(
        "/ready",
        responses=responses(documents.HealthDocument, aged=False, s503="Not yet, or not any more."),
        summary="Are its partitions up to date?",
    )
    async def ready() -> Response:
        missing = service.waits_for()
        if missing:
            return _json({"status": "not ready", "waiting_for": missing}, 503)
        return _json({"status": "ready", "waiting_for": []})

    @app.get("/tables", responses=responses(documents.TablesDocument, aged=False), summary="All tables")
    async def tables() -> Response:
        return _json({"tables": [each.document(service.routes) for each in service.tables.values()]})

    @app.get("/tables/{table}", responses=responses(documents.TableDocument, aged=False), summary="One table")
    async def table(table: str) -> Response:
        if table not in service.tables:
            raise Problem(404, f"There is no table {table[:249]!r}", next_step="GET /tables lists them")
        return _json(service.tables[table].document(service.routes))


def _add_lookups(app: FastAPI, service: Service) -> None:
    @app.get("/tables/{table}/keys/{key:path}", responses=responses(documents.ValueDocument), summary="One key")
    async def get(
        request: Request,
        table: str,
        key: str,
        key_encoding: KeyEncoding = None,
        value_encoding: ValueEncoding = None,
        min_position: MinPosition = None,
        max_staleness: MaxStaleness = None,
        wait: Wait = None,
    ) -> Response:
        wish = wish_of(table, service.limits, min_position, max_staleness, wait)
        served = service.table(table)
        return await one_key(
            served, key_in_path(request.scope), served.format.wished(key_encoding, value_encoding), wish
        )

    @app.post(
        "/tables/{table}/multi-get",
        responses=responses(documents.RowsDocument),
        openapi_extra=_KEYS_BODY,
        summary="Many keys",
    )
    async def multi_get(
        request: Request,
        table: str,
        key_encoding: KeyEncoding = None,
        value_encoding: ValueEncoding = None,
        min_position: MinPosition = None,
        max_staleness: MaxStaleness = None,
        wait: Wait = None,
    ) -> Response:
        served = service.table(table)
        written = served.format.wished(key_encoding, value_encoding)
        keys = [written.keys.key(each) for each in _keys(await request.body(), service.limits.keys)]
        wish = wish_of(table, service.limits, min_position, max_staleness, wait)
        values, seen = await served.routed.get_many(keys, wish)
        found = [written.item(key, raw) for key, raw in zip(keys, values, strict=True) if raw is not None]
        return answer({"table": table, "rows": found, **seen.members(table)}, table, seen)

    @app.get("/tables/{table}/count", responses=responses(documents.CountDocument), summary="How many keys there are")
    async def count(
        table: str, min_position: MinPosition = None, max_staleness: MaxStaleness = None, wait: Wait = None
    ) -> Response:
        served = service.table(table)
        wish = wish_of(table, service.limits, min_position, max_staleness, wait)
        number, seen = await served.routed.count(wish)
        return answer({"table": table, "count": number, **seen.members(table)}, table, seen)


def _add_range(app: FastAPI, service: Service) -> None:
    @app.get(
        "/tables/{table}/range",
        responses={
            **responses(documents.RangeDocument),
            200: {**responses(documents.RangeDocument)[200], **_LINES[200]},
        },
        summary="Keys in order, from a start to an end, or with a prefix",
    )
    async def range_(
        table: str,
        start: Annotated[str | None, Query(description="The first key. Default: that of the table.")] = None,
        end: Annotated[str | None, Query(description="The key before which the range ends.")] = None,
        prefix: Annotated[str | None, Query(description="Only keys that begin with this.")] = None,
        reverse: Annotated[bool, Query(description="The last key first.")] = False,
        limit: Annotated[int | None, Query(ge=1, description="Rows. Default: 100, or all if streamed.")] = None,
        cursor: Annotated[str | None, Query(description="Continue the same request after this.")] = None,
        accept: Annotated[str, Header(description="application/x-ndjson: all rows, streamed line by line.")] = "*/*",
        key_encoding: KeyEncoding = None,
        value_encoding: ValueEncoding = None,
        min_position: MinPosition = None,
        max_staleness: MaxStaleness = None,
        wait: Wait = None,
    ) -> Response:
        served = service.table(table)
        written = served.format.wished(key_encoding, value_encoding)
        low = b"" if start is None else written.keys.key(start, "start")
        high = None if end is None else written.keys.key(end, "end")
        if prefix is not None:
            begin = written.keys.key(prefix, "prefix")
            low, high = max(low, begin), _lesser(high, rows.after(begin))
        if cursor is not None:
            last = cursor_of(cursor)
            low, high = (low, _lesser(high, last)) if reverse else (max(low, last + b"\0"), high)
        wish = wish_of(table, service.limits, min_position, max_staleness, wait)
        wanted = Wanted(low, high, reverse, limit, wish, written)
        if "application/x-ndjson" in accept:
            return await as_lines(service, served, wanted)
        return await as_page(service, served, wanted)


def _add_changes(app: FastAPI, service: Service) -> None:
    @app.get(
        "/tables/{table}/changes",
        responses={200: _EVENTS[200], "default": responses(documents.CountDocument)["default"]},
        summary="Changes as they are committed (server-sent events)",
    )
    async def changes(
        request: Request,
        table: str,
        since: Annotated[
            str | None, Query(description="Begin at this position. Default: with what is committed from now on.")
        ] = None,
        prefix: Annotated[str | None, Query(description="Only keys that begin with this.")] = None,
        last_event_id: Annotated[str | None, Header(description="As since; browsers send it.")] = None,
        key_encoding: KeyEncoding = None,
        value_encoding: ValueEncoding = None,
    ) -> Response:
        served = service.table(table)
        written = served.format.wished(key_encoding, value_encoding)
        begin = b"" if prefix is None else written.keys.key(prefix, "prefix")
        return await changes_of(service, served, last_event_id or since, begin, written)


def _keys(body: bytes, keys_max: int) -> list[Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as wrong:
        raise Problem(400, f"The body is not JSON: {wrong}", next_step='send {"keys": ["a", "b"]}') from wrong
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise Problem(400, "The body has no list of keys", next_step='send {"keys": ["a", "b"]}')
    if len(keys) > keys_max:
        raise Problem(413, f"{len(keys):,} keys are more than {keys_max:,}", next_step="ask for fewer keys at once")
    return keys


def _lesser(one: bytes | None, other: bytes | None) -> bytes | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _json(document: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


async def _problem(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return problem.response()


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, OnceflowError)
    return _failed_response(error)


def _failed_response(error: OnceflowError) -> Response:
    log.error("a request failed: %s", error)
    return unavailable(error).response()


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    what = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors())
    return Problem(400, what, next_step="look at /docs").response()


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Problem(error.status_code, str(error.detail), next_step="look at /docs", headers=error.headers).response()
