"""Asks other instances over HTTP. They answer with what they have themselves, and ask nobody else."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from onceflow.server.local import LocalTable, NotHereError, Rows
from onceflow.server.merging import Part
from onceflow.server.problems import Problem
from onceflow.server.routed import UnreachableError
from onceflow.server.seen import Seen, Wish
from onceflow.server.service import Service

_CONNECT_S, _ANSWER_S = 1.0, 3.0
_AVOIDED_S = 1.0  # one that did not answer in time
_CONNECTIONS = 100
_NOT_HERE = 409
_PAGE_ROWS = 1_000


class HttpPeers:
    """Other instances. Used by one event loop.

    Args:
        token: a bearer token that all instances accept; None: they need none.
        authority: PEM file of the authorities for their certificates; None: those of the system.
    """

    def __init__(self, token: str | None, authority: Path | None) -> None:
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._authority = authority
        self._client: httpx.AsyncClient | None = None
        self._avoided: dict[str, float] = {}

    async def get_many(
        self, address: str, topic: str, keys: Sequence[bytes], places: Mapping[int, Sequence[int]], wish: Wish
    ) -> tuple[dict[int, list[bytes | None]], Seen]:
        """The values of keys in partitions. Places: which of the keys are looked for in each partition."""
        used = sorted({at for ats in places.values() for at in ats})
        numbers = {at: number for number, at in enumerate(used)}
        wanted = [
            [partition, None if len(ats) == len(used) else [numbers[at] for at in ats]]
            for partition, ats in places.items()
        ]
        document = {"keys": [_text(keys[at]) for at in used], "places": wanted}
        answer = await self._ask(address, topic, "get", document, wish)
        values = zip(places, answer["values"], strict=True)
        return {partition: [_bytes(each) for each in found] for partition, found in values}, Seen.read(answer["seen"])

    async def page(
        self, address: str, topic: str, part: Part, wish: Wish, *, reverse: bool, limit: int
    ) -> tuple[Rows, bool, Seen]:
        """The first rows of a range in some partitions, and whether these are all."""
        document = {
            "partitions": list(part.partitions),
            "low": _text(part.low),
            "high": _text(part.high),
            "reverse": reverse,
            "limit": limit,
        }
        answer = await self._ask(address, topic, "page", document, wish)
        rows = [(base64.b64decode(key), base64.b64decode(value)) for key, value in answer["rows"]]
        return rows, answer["done"], Seen.read(answer["seen"])

    async def count(self, address: str, topic: str, partitions: Collection[int], wish: Wish) -> tuple[int, Seen]:
        """How many keys some partitions have."""
        answer = await self._ask(address, topic, "count", {"partitions": list(partitions)}, wish)
        return answer["count"], Seen.read(answer["seen"])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, address: str, topic: str, what: str, document: dict[str, Any], wish: Wish) -> Any:
        if self._avoided.get(address, 0.0) > time.monotonic():
            raise UnreachableError(address)
        if self._client is None:
            self._client = self._connected()
        waits_s = wish.left_s if wish.least or wish.staleness_ms is not None else 0.0
        timeout = httpx.Timeout(waits_s + _ANSWER_S, connect=_CONNECT_S)
        content = orjson.dumps({**document, "wish": wish.document()})
        url = f"{address}/peer/{topic}/{what}"
        try:
            response = await self._client.post(url, content=content, timeout=timeout, headers=self._headers)
        except httpx.TimeoutException as late:
            self._avoided[address] = time.monotonic() + _AVOIDED_S
            raise UnreachableError(address) from late
        except httpx.HTTPError as failed:
            raise UnreachableError(address) from failed
        return _read(address, response)

    def _connected(self) -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=None if self._authority is None else str(self._authority))
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS, keepalive_expiry=4)
        return httpx.AsyncClient(limits=limits, verify=context, trust_env=False)


def _read(address: str, response: httpx.Response) -> Any:
    if response.status_code == 200:
        return orjson.loads(response.content)
    if response.status_code == _NOT_HERE:
        raise NotHereError(orjson.loads(response.content)["not_here"])
    if response.headers.get("content-type") != "application/problem+json":
        raise UnreachableError(f"{address} answers {response.status_code}")
    document = orjson.loads(response.content)
    if response.status_code in (401, 404):  # another token, or not all of the tables
        raise UnreachableError(f"{address}: {document['detail']}")
    names = ("Retry-After", "Onceflow-Position", "Onceflow-Lag-Records", "Onceflow-Lag-Ms")
    headers = {name: response.headers[name] for name in names if name in response.headers}
    more = {name: document[name] for name in ("position", "lag") if name in document}
    raise Problem(
        response.status_code,
        document["detail"],
        next_step=document.get("next_step", ""),
        headers=headers,
        more=more,
    )


def peer_routes(service: Service) -> APIRouter:
    """The routes for other instances."""
    router = APIRouter(prefix="/peer/{table}", include_in_schema=False)

    @router.post("/{what}")
    async def peer(request: Request, table: str, what: str) -> Response:
        local = service.table(table).local
        body = await request.body()
        try:
            document = orjson.loads(body)
            wish = Wish.read(document["wish"], service.limits.request_s)
            if what == "get":
                answer = await _get(local, document, wish)
            elif what == "page":
                answer = await _page(local, document, wish)
            elif what == "count":
                seen = await local.wait(document["partitions"], wish)
                answer = {"count": await local.count(document["partitions"]), "seen": seen.document()}
            else:
                raise Problem(404, "There is nothing at this path")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as wrong:
            raise Problem(400, f"This is no request of another instance: {wrong!r:.200}") from wrong
        return Response(orjson.dumps(answer), media_type="application/json")

    return router


async def _get(local: LocalTable, document: Any, wish: Wish) -> dict[str, Any]:
    keys = [base64.b64decode(key) for key in document["keys"]]
    places = {partition: keys if ats is None else [keys[at] for at in ats] for partition, ats in document["places"]}
    seen = await local.wait(places, wish)
    values = [list(map(_text, local.get_many(partition, wanted))) for partition, wanted in places.items()]
    return {"values": values, "seen": seen.document()}


async def _page(local: LocalTable, document: Any, wish: Wish) -> dict[str, Any]:
    partitions, low, high = document["partitions"], base64.b64decode(document["low"]), _bytes(document["high"])
    seen = await local.wait(partitions, wish)
    limit = min(int(document["limit"]), _PAGE_ROWS)
    rows, done = await local.page(partitions, low, high, reverse=document["reverse"], limit=limit)
    return {"rows": [[_text(key), _text(value)] for key, value in rows], "done": done, "seen": seen.document()}


async def not_here(_: Request, error: Exception) -> Response:
    """The answer of a route for other instances that does not have (all of) the partitions."""
    assert isinstance(error, NotHereError)
    return Response(orjson.dumps({"not_here": error.partitions}), _NOT_HERE, media_type="application/json")


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else base64.b64encode(raw).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
