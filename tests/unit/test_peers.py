"""What one instance of the query server asks another one, with a real server that counts requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import trustme
from aiohttp import web

from onceflow.server import peers
from onceflow.server.local import NotHereError
from onceflow.server.peer_auth import HEADER, Asked, PeerSecrets
from onceflow.server.peer_requests import from_text, text_of
from onceflow.server.peers import HttpPeers
from onceflow.server.problems import MEDIA_TYPE, RETRY_AFTER_S, Problem
from onceflow.server.routed import UnreachableError
from onceflow.server.staleness import AnswerAge, Freshness

Requests = list[dict[str, Any]]
GONE = 7
SECRETS = PeerSecrets(["a-secret-of-the-tests"])


@asynccontextmanager
async def other(
    answer: Callable[[dict[str, Any]], Awaitable[web.Response]], *, proven: bool = True
) -> AsyncIterator[tuple[HttpPeers, str]]:
    """Another instance, and what asks it."""

    async def handle(request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers
        body = await request.read()
        host, port = runner.addresses[0]
        nonce = SECRETS.check_request(request.headers[HEADER], Asked(f"http://{host}:{port}", request.path, body))
        found = await answer(orjson.loads(body))
        if proven:
            assert isinstance(found.body, bytes)
            found.headers[HEADER] = SECRETS.answer_proof(nonce, found.status, found.body)
        return found

    app = web.Application()
    app.router.add_post("/peer/t/get", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    asking = HttpPeers(SECRETS, None)
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        yield asking, f"http://{host}:{port}"
    finally:
        await asking.close()
        await runner.cleanup()


def answered(asked: dict[str, Any]) -> web.Response:
    """The value of a key is the key in upper case; partition 7 is not here, and p is at offset 10 * p."""
    places = []
    for partition, ats in asked["places"]:
        keys = asked["keys"] if ats is None else [asked["keys"][at] for at in ats]
        values = [text_of((from_text(key) or b"").upper()) for key in keys]
        seen = AnswerAge({partition: 10 * partition}, 0, 5)
        places.append(None if partition == GONE else [values, seen.document()])
    return web.Response(body=orjson.dumps({"places": places, "layout": [0, 0]}))


def test_lookups_of_one_key_are_sent_together() -> None:
    async def run() -> None:
        asked: Requests = []
        go_on = asyncio.Event()

        async def answer(document: dict[str, Any]) -> web.Response:
            asked.append(document)
            await go_on.wait()
            return answered(document)

        async with other(answer) as (asking, address):

            async def one(number: int, freshness: Freshness) -> Any:
                return await asking.get_many(address, "t", [b"key-%d" % number], {number % 8: [0]}, freshness)

            first = asyncio.create_task(one(0, Freshness(until=1.0)))
            while not asked:
                await asyncio.sleep(0.001)
            later = [asyncio.create_task(one(number, Freshness(until=number))) for number in range(1, 150)]
            # Two demand something: each is a request of its own, with what it demands.
            fresh = [
                asyncio.create_task(one(1, freshness)) for freshness in (Freshness({1: 3}), Freshness(staleness_ms=99))
            ]
            while len(asked) < 3:
                await asyncio.sleep(0.001)
            later[1].cancel()
            go_on.set()
            found = await asyncio.gather(first, *later, *fresh, return_exceptions=True)
        assert sorted(len(each["keys"]) for each in asked) == [1, 1, 1, 49, 100]
        assert sorted(
            str(each["freshness"]["least"]) + str(each["freshness"]["staleness_ms"]) for each in asked[1:3]
        ) == [
            "[[1, 3]]None",
            "[]99",
        ]
        assert isinstance(found[2], asyncio.CancelledError)
        for number, answer_ in list(enumerate(found[:150])):
            if number % 8 == GONE:
                assert isinstance(answer_, NotHereError)
                assert answer_.partitions == [GONE]
            elif number != 2:
                partition = number % 8
                assert answer_ == ({partition: [b"KEY-%d" % number]}, AnswerAge({partition: 10 * partition}, 0, 5))
        assert found[150] == found[151] == ({1: [b"KEY-1"]}, AnswerAge({1: 10}, 0, 5))

    asyncio.run(run())


def test_all_lookups_get_the_error_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_ANSWER_S", 0.3)

    async def run() -> None:
        asked: Requests = []
        silent = False

        async def answer(document: dict[str, Any]) -> web.Response:
            asked.append(document)
            if silent:
                await asyncio.sleep(10)
            problem = Problem(503, "It stops", next_step="ask again")
            return web.Response(
                status=503, body=orjson.dumps(problem.document()), headers=problem.headers, content_type=MEDIA_TYPE
            )

        async with other(answer) as (asking, address):

            async def several(address: str) -> list[Any]:
                lookups = (asking.get_many(address, "t", [b"k"], {0: [0]}, Freshness()) for _ in range(5))
                return await asyncio.gather(*lookups, return_exceptions=True)

            for found in await several(address):
                assert isinstance(found, Problem)
                assert (found.status, found.detail, found.next_step) == (503, "It stops", "ask again")
                assert found.headers["Retry-After"]
            silent = True
            assert {type(found) for found in await several(address)} == {UnreachableError}
            # One that did not answer in time is not asked for a while.
            before = len(asked)
            assert {type(found) for found in await several(address)} == {UnreachableError}
            assert len(asked) == before
        # Nobody listens any more, which is no reason to wait.
        asking = HttpPeers(SECRETS, None)
        with pytest.raises(UnreachableError):
            await asking.get_many(address, "t", [b"k"], {0: [0]}, Freshness())
        with pytest.raises(UnreachableError):
            await asking.get_many(address, "t", [b"k", b"l"], {0: [0, 1]}, Freshness())
        await asking.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "response, said, advice",
    [
        ((404, MEDIA_TYPE, b'{"detail":"There is no table"}'), "answers 404: There is no table", "the same tables"),
        ((502, "text/html", b"<html>"), "answers 502, not as an instance does", "--advertise"),
        ((200, "text/html", b"<html>"), "answers 200, not as an instance does", "--advertise"),
        ((200, "application/json", b"[]"), "answers 200, not as an instance does", "--advertise"),
        ((409, "application/json", b"{}"), "answers 409, not as an instance does", "--advertise"),
        ((500, MEDIA_TYPE, b"{}"), "answers 500, not as an instance does", "--advertise"),
    ],
)
def test_an_answer_that_is_none_of_an_instance_of_the_group(
    response: tuple[int, str, bytes],
    said: str,
    advice: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is logged, once a minute for each instance."""
    status, kind, body = response
    clock = [1000.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run() -> None:
        async def answer(document: dict[str, Any]) -> web.Response:
            return web.Response(status=status, body=body, content_type=kind)

        async with other(answer) as (asking, address):
            for at, lines in ((0, 1), (59, 1), (61, 2), (62, 2)):
                clock[0] = 1000.0 + at
                with pytest.raises(UnreachableError) as caught:
                    await asking.get_many(address, "t", [b"k"], {0: [0]}, Freshness())
                assert str(caught.value).startswith(f"{address} {said}")
                assert advice in caught.value.next_step
                warned = [each for each in caplog.records if each.levelname == "WARNING"]
                assert len(warned) == lines
                assert f"instance {address} {said}" in warned[-1].getMessage()
                assert advice in warned[-1].getMessage()

    asyncio.run(run())


@pytest.mark.parametrize(
    "status, body, said",
    [
        (
            200,
            b'{"places": [[["YSBsaWU="], [[[0, 9]], 0, 0, "", 1]]], "layout": [0, 0]}',
            "answers 200 without a proof",
        ),
        (401, b'{"detail": "its proof is not made with a secret of this instance"}', "answers 401: its proof"),
        (401, b"[]", "answers 401: no reason is given"),
        (409, b'{"not_here": [0]}', "answers 409 without a proof"),
        (302, b"", "answers 302 without a proof"),
        (503, b"", "does not answer"),
    ],
)
def test_an_answer_without_a_proof(status: int, body: bytes, said: str) -> None:
    """A stranger in the group could claim an address, and feed false answers."""

    async def run() -> None:
        async def answer(document: dict[str, Any]) -> web.Response:
            return web.Response(status=status, body=body, content_type="application/json")

        async with other(answer, proven=False) as (asking, address):
            for ats in ([0], [0, 1]):
                with pytest.raises(UnreachableError, match=said) as caught:
                    await asking.get_many(address, "t", [b"k", b"l"][: len(ats)], {0: ats}, Freshness())
            assert ("--peer-secret-file" in caught.value.next_step) == (status != 503)

    asyncio.run(run())


def test_headers_of_an_answer_are_not_believed() -> None:
    """The proof covers status and document. Whoever is between two instances can change the headers."""

    async def run() -> None:
        async def answer(document: dict[str, Any]) -> web.Response:
            told = {"detail": "It is not as far", "position": "t@id:5", "lag": {"records": 7, "ms": None}}
            false = {"Onceflow-Position": "t@id:99999999", "Onceflow-Lag-Ms": "0", "Retry-After": "86400"}
            return web.Response(status=503, body=orjson.dumps(told), content_type=MEDIA_TYPE, headers=false)

        async with other(answer) as (asking, address):
            with pytest.raises(Problem, match="It is not as far") as caught:
                await asking.get_many(address, "t", [b"k"], {0: [0]}, Freshness())
        expected = {"Onceflow-Position": "t@id:5", "Onceflow-Lag-Records": "7", "Retry-After": str(RETRY_AFTER_S)}
        assert caught.value.headers == expected

    asyncio.run(run())


def test_a_certificate_that_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def run() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        asking = HttpPeers(SECRETS, None)
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            host, port = runner.addresses[0]
            with pytest.raises(UnreachableError, match="cannot be asked with TLS"):
                await asking.get_many(f"https://{host}:{port}", "t", [b"k"], {0: [0]}, Freshness())
        finally:
            await asking.close()
            await runner.cleanup()

    asyncio.run(run())
    assert "--tls-authority" in caplog.text
