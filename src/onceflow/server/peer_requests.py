"""Answers to other instances: what this one has itself. They are told when a partition is not here."""

from __future__ import annotations

import base64
from typing import Any, overload

import orjson
from starlette.requests import Request
from starlette.responses import Response

from onceflow.errors import OnceflowError
from onceflow.server.local import LocalTable, NotHereError, Room
from onceflow.server.options import Limits
from onceflow.server.peer_auth import HEADER, Asked
from onceflow.server.problems import Problem, failed
from onceflow.server.service import Service
from onceflow.server.staleness import Freshness

#: The status of an answer that says that partitions are not here.
NOT_HERE = 409
_PAGE_ROWS = 1_000


async def answer_peer(service: Service, table: str, what: str, request: Request) -> Response:
    """The answer to a request of another instance, with a proof that it is of this one.

    Raises:
        Problem: 401 or 404, it is no such request. This answer has no such proof.
    """
    if service.secrets is None:
        raise Problem(404, "There is nothing at this path")
    asked = Asked(service.routes.address, f"/peer/{table}/{what}", await request.body())
    nonce = service.secrets.check_request(request.headers.get(HEADER, ""), asked)
    try:
        response = await _answer(service, table, what, asked.body)
    except Problem as problem:
        response = problem.response()
    except OnceflowError as error:
        response = failed(error).response()
    response.headers[HEADER] = service.secrets.answer_proof(nonce, response.status_code, bytes(response.body))
    return response


async def _answer(service: Service, table: str, what: str, body: bytes) -> Response:
    """The answer to a request of another instance.

    Raises:
        Problem: 400 or 404, it is no such request; 413, it asks for too much; 503, not now.
    """
    local, limits = service.table(table).local, service.limits
    try:
        document = orjson.loads(body)
        freshness = Freshness.read(document["freshness"], limits.request_s)
        local.hear(freshness.layout)
        if what == "get":
            answer = await _get(local, document, freshness, limits)
        elif what == "page":
            answer = await _page(local, document, freshness)
        elif what == "count":
            partitions = _partitions(document)
            seen = await local.wait(partitions, freshness)
            answer = {"count": await local.count(partitions), "seen": seen.document()}
        else:
            raise Problem(404, "There is nothing at this path")
    except NotHereError as error:
        return Response(orjson.dumps({"not_here": error.partitions}), NOT_HERE, media_type="application/json")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as wrong:
        raise Problem(400, f"This is no request of another instance: {wrong!r:.200}") from wrong
    answer["layout"] = local.layout  # afterwards: then no tombstone of a row that has moved is in it without it
    return Response(orjson.dumps(answer), media_type="application/json")


def _partitions(document: Any) -> list[int]:
    """The partitions that a request names, each once: another instance names none twice."""
    given = document["partitions"]
    if not isinstance(given, list) or not all(type(each) is int and each >= 0 for each in given):
        raise ValueError("partitions are numbers")
    return list(dict.fromkeys(given))


def _places(document: Any, keys: list[bytes], most: int) -> dict[int, list[bytes]]:
    """The keys that are looked for in each partition.

    A small request must not make a large answer, or much work: so it is counted what it asks for.

    Raises:
        Problem: 413, that is too much.
    """
    found: dict[int, list[bytes]] = {}
    count = 0
    for partition, ats in document["places"]:
        if type(partition) is not int or partition < 0 or partition in found:
            raise ValueError("a partition is named once, by its number")
        count += len(keys if ats is None else ats)
        if count > most:
            raise Problem(413, f"More than {most:,} look-ups are too many", next_step="ask for fewer keys at a time")
        if ats is not None and any(type(at) is not int or at < 0 for at in ats):
            raise ValueError("keys are named by their numbers")
        found[partition] = keys if ats is None else [keys[at] for at in ats]
    return found


async def _get(local: LocalTable, document: Any, freshness: Freshness, limits: Limits) -> dict[str, Any]:
    """Values by partition, and how old they are; null for a partition that is not here.

    Each partition has an answer of its own, because the keys may be those of several requests.
    """
    keys = [base64.b64decode(key) for key in document["keys"]]
    places = _places(document, keys, limits.lookups)
    if freshness.demands:
        await local.wait(places, freshness)
    room = Room(limits.answer_bytes)
    answers: list[Any] = []
    for partition, wanted in places.items():
        try:
            seen = await local.wait((partition,), Freshness())
            values = await local.get_many(partition, wanted, room)
            answers.append([list(map(text_of, values)), seen.document()])
        except NotHereError:
            answers.append(None)
    return {"places": answers}


async def _page(local: LocalTable, document: Any, freshness: Freshness) -> dict[str, Any]:
    partitions, low, high = _partitions(document), base64.b64decode(document["low"]), from_text(document["high"])
    seen = await local.wait(partitions, freshness)
    limit = max(1, min(int(document["limit"]), _PAGE_ROWS))
    rows, done = await local.page(partitions, low, high, reverse=document["reverse"], limit=limit)
    return {"rows": [[text_of(key), text_of(value)] for key, value in rows], "done": done, "seen": seen.document()}


def text_of(raw: bytes | None) -> str | None:
    """Bytes for a JSON document."""
    return None if raw is None else base64.b64encode(raw).decode()


@overload
def from_text(text: str) -> bytes: ...


@overload
def from_text(text: str | None) -> bytes | None: ...


def from_text(text: str | None) -> bytes | None:
    """The bytes that `text_of` has written."""
    return None if text is None else base64.b64decode(text)
