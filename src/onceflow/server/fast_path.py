"""Answers the commonest requests itself: look-ups of one key, and what other instances ask."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onceflow.errors import OnceflowError
from onceflow.server.formats import Format
from onceflow.server.peer_requests import answer_peer
from onceflow.server.problems import Problem, disconnected, failed
from onceflow.server.requests import KEY_ENCODINGS, VALUE_ENCODINGS, freshness_of, text_key
from onceflow.server.service import Served, Service
from onceflow.server.staleness import AnswerAge, Freshness


class FastPath:
    """An ASGI application around that of FastAPI, which would take most of the time of such a request.

    A request with anything unusual goes on to FastAPI.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope.get("raw_path", b"").split(b"/", 4)
        table = parts[2].decode("latin-1") if len(parts) > 3 else ""
        try:
            response = None
            if table in self._service.tables:
                if len(parts) == 5 and parts[1] == b"tables" and parts[3] == b"keys" and scope["method"] == "GET":
                    response = await self._one_key(table, parts[4], scope["query_string"])
                elif len(parts) == 4 and parts[1] == b"peer" and scope["method"] == "POST":
                    what = parts[3].decode("latin-1")
                    response = await answer_peer(self._service, table, what, Request(scope, receive))
        except Problem as problem:
            response = problem.response()
        except OnceflowError as error:
            response = failed(error).response()
        except ClientDisconnect:
            response = disconnected().response()
        await (self._app if response is None else response)(scope, receive, send)

    async def _one_key(self, table: str, path_key: bytes, query: bytes) -> Response | None:
        """The answer; None: there is an unusual parameter."""
        given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}
        encodings = given.pop("key_encoding", None), given.pop("value_encoding", None)
        if encodings[0] not in KEY_ENCODINGS or encodings[1] not in VALUE_ENCODINGS:
            return None
        demands = given.pop("min_position", None), given.pop("max_staleness", None), given.pop("wait", None)
        if given:
            return None
        freshness = freshness_of(table, self._service.limits, *demands)
        served = self._service.table(table)
        return await one_key(served, unquote_to_bytes(path_key), served.format.with_encodings(*encodings), freshness)


async def one_key(served: Served, path_key: bytes, written: Format, freshness: Freshness) -> Response:
    """The value of a key.

    Args:
        path_key: as it stands in the path, without percent-encoding.

    Raises:
        Problem: 400, the key is invalid; 404, there is none; 422, its value does not fit the format; 503, not now.
    """
    topic = served.topic
    key = written.keys.key(text_key(path_key))
    raw, seen = await served.routed.get(key, freshness)
    found = {"table": topic, "key": written.keys.show(key), **seen.members(topic)}
    if raw is None:
        detail = f"Table {topic} has no such key"
        if seen.lag_records:
            detail += f" as far as it is read here: up to {seen.lag_records:,} committed records are missing"
        raise Problem(404, detail, headers=seen.headers(topic), more=found)
    await written.learn([raw])
    value, error = written.value(raw)
    if error:
        next_step = "ask with value_encoding=base64"
        raise Problem(422, error, next_step=next_step, headers=seen.headers(topic), more=found)
    found["value"] = value
    return answer(found, topic, seen)


def answer(document: Any, topic: str, seen: AnswerAge) -> Response:
    """A JSON document with the headers that say how old it is."""
    return Response(orjson.dumps(document), 200, seen.headers(topic), "application/json")
