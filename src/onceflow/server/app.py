"""The routes of the query server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, get_type_hints

import orjson
from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from onceflow._version import __version__
from onceflow.errors import OnceflowError
from onceflow.server import documents
from onceflow.server.access import TRUSTED
from onceflow.server.changes import changes_of
from onceflow.server.documents import responses
from onceflow.server.fast_path import answer, one_key
from onceflow.server.problems import Problem, disconnected, failed
from onceflow.server.ranges import Wanted, as_lines, as_page
from onceflow.server.requests import (
    AgeParameters,
    ChangesParameters,
    LookupParameters,
    RangeParameters,
    check_query,
    key_in_path,
    unknown_parameter,
)
from onceflow.server.service import Service
from onceflow.state.format import exact_json

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
    app.add_exception_handler(ClientDisconnect, _disconnected)
    _add_state(app, service)
    _add_lookups(app, service)
    _add_range(app, service)
    _add_changes(app, service)
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    # Some probes ask with HEAD.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=responses(documents.HealthDocument, aged=False), summary="Does it run?")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get(
        "/ready",
        responses=responses(documents.HealthDocument, aged=False, s503="Not yet, or not any more."),
        summary="Are its partitions up to date?",
    )
    async def ready(request: Request) -> Response:
        missing = service.waits_for(trusted=request.scope.get(TRUSTED, True))
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
    async def get(request: Request, table: str, key: str, given: Annotated[LookupParameters, Query()]) -> Response:
        freshness = given.freshness(table, service.limits)
        served = service.table(table)
        return await one_key(served, key_in_path(request.scope), given.format(served.format), freshness)

    @app.post(
        "/tables/{table}/multi-get",
        responses=responses(documents.RowsDocument),
        openapi_extra=_KEYS_BODY,
        summary="Many keys",
    )
    async def multi_get(request: Request, table: str, given: Annotated[LookupParameters, Query()]) -> Response:
        served = service.table(table)
        written = given.format(served.format)
        given_keys = (written.keys.key(each) for each in _keys(await request.body(), service.limits.keys))
        keys = list(dict.fromkeys(given_keys))
        freshness = given.freshness(table, service.limits)
        values, seen = await served.routed.get_many(keys, freshness)
        await written.learn(values)
        found = [written.item(key, raw) for key, raw in zip(keys, values, strict=True) if raw is not None]
        return answer({"table": table, "rows": found, **seen.members(table)}, table, seen)

    @app.get("/tables/{table}/count", responses=responses(documents.CountDocument), summary="How many keys there are")
    async def count(table: str, given: Annotated[AgeParameters, Query()]) -> Response:
        served = service.table(table)
        freshness = given.freshness(table, service.limits)
        number, seen = await served.routed.count(freshness)
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
        request: Request,
        table: str,
        given: Annotated[RangeParameters, Query()],
        accept: Annotated[str, Header(description="application/x-ndjson: all rows, streamed line by line.")] = "*/*",
    ) -> Response:
        served = service.table(table)
        written = given.format(served.format)
        check_query(request.scope)
        low, high = given.bounds(written)
        wanted = Wanted(low, high, given.reverse, given.limit, given.freshness(table, service.limits), written)
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
        given: Annotated[ChangesParameters, Query()],
        last_event_id: Annotated[str | None, Header(description="As since; browsers send it.")] = None,
    ) -> Response:
        served = service.table(table)
        written = given.format(served.format)
        check_query(request.scope)
        begin = b"" if given.prefix is None else written.keys.prefix(given.prefix)
        return await changes_of(service, served, last_event_id or given.since, begin, written)


def _keys(body: bytes, keys_max: int) -> list[Any]:
    try:
        document = exact_json.loads(body)
    except ValueError as wrong:
        raise Problem(400, f"The body is not JSON: {wrong}", next_step='send {"keys": ["a", "b"]}') from wrong
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise Problem(400, "The body has no list of keys", next_step='send {"keys": ["a", "b"]}')
    if len(keys) > keys_max:
        raise Problem(413, f"{len(keys):,} keys are more than {keys_max:,}", next_step="ask for fewer keys at once")
    return keys


def _json(document: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


async def _problem(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return problem.response()


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, OnceflowError)
    return failed(error).response()


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    for each in error.errors():
        if each["type"] == "extra_forbidden":
            given = get_type_hints(request.scope["route"].endpoint)["given"]
            return unknown_parameter(str(each["loc"][-1]), given.model_fields).response()
    what = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors())
    return Problem(400, what, next_step="look at /docs").response()


async def _disconnected(_: Request, __: Exception) -> Response:
    return disconnected().response()


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Problem(error.status_code, str(error.detail), next_step="look at /docs", headers=error.headers).response()
