"""Asks other instances over HTTP. They answer with what they have themselves, and ask nobody else."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from onceflow.server.local import NotHereError, Rows
from onceflow.server.merging import Part
from onceflow.server.peer_auth import HEADER, Asked, PeerSecrets
from onceflow.server.peer_requests import NOT_HERE, from_text, text_of
from onceflow.server.problems import MEDIA_TYPE, Problem
from onceflow.server.routed import UnreachableError
from onceflow.server.staleness import AnswerAge, Freshness, age_headers

log = logging.getLogger("onceflow.server")

_CONNECT_S, _ANSWER_S = 1.0, 3.0
_AVOIDED_S = 1.0  # one that did not answer in time
_CONNECTIONS = 100
_IDLE_S = 4.0  # shorter than instances keep idle connections open
_LOOKUPS_AT_ONCE = 100
_ANSWER_BYTES = 256 << 20  # a single row may be large
_WARN_S = 60.0

#: What helps if an instance answers with this status.
_STEPS = {
    401: "give all instances of the group the same secret (--peer-secret-file), each its own address (--advertise), "
    "and clocks that agree",
    404: "give all instances of the group the same tables",
}


class _Lookup(NamedTuple):
    """One key, looked for in one partition, that waits for its turn."""

    partition: int
    key: bytes
    layout: tuple[int, int]
    found: asyncio.Future[tuple[bytes | None, AnswerAge]]


class HttpPeers:
    """Other instances. Used by one event loop.

    Look-ups of one key that demand nothing of the age of their answers are sent together: those that come while a
    request to the same instance is under way become the next request.

    Args:
        secrets: by which instances recognise each other.
        authority: PEM file of the authorities for their certificates; None: those of the system.
    """

    def __init__(self, secrets: PeerSecrets, authority: Path | None) -> None:
        self._secrets = secrets
        self._authority = authority
        self._session: aiohttp.ClientSession | None = None
        self._avoided: dict[str, float] = {}
        self._warned: dict[str, float] = {}
        self._lookups: dict[tuple[str, str], deque[_Lookup]] = {}  # of those that are asked just now
        self._tasks: set[asyncio.Task[None]] = set()

    async def get_many(
        self, address: str, topic: str, keys: Sequence[bytes], places: Mapping[int, Sequence[int]], freshness: Freshness
    ) -> tuple[dict[int, list[bytes | None]], AnswerAge]:
        """The values of keys in partitions. Places: which of the keys are looked for in each partition."""
        if len(places) == 1 and not freshness.demands:
            ((partition, ats),) = places.items()
            if len(ats) == 1:
                value, seen = await self._looked_up(address, topic, partition, keys[ats[0]], freshness.layout)
                return {partition: [value]}, seen
        answers = await self._get(address, topic, keys, places, freshness)
        if missing := [partition for partition, answer in answers.items() if answer is None]:
            raise NotHereError(missing)
        found = {partition: answer[0] for partition, answer in answers.items() if answer}
        return found, AnswerAge.all_of(answer[1] for answer in answers.values() if answer)

    async def page(
        self, address: str, topic: str, part: Part, freshness: Freshness, *, reverse: bool, limit: int
    ) -> tuple[Rows, bool, AnswerAge]:
        """The first rows of a range in some partitions, and whether these are all."""
        document = {
            "partitions": list(part.partitions),
            "low": text_of(part.low),
            "high": text_of(part.high),
            "reverse": reverse,
            "limit": limit,
        }
        answer = await self._ask(address, topic, "page", document, freshness)
        rows = [(from_text(key), from_text(value)) for key, value in answer["rows"]]
        return rows, answer["done"], AnswerAge.read(answer["seen"], answer["layout"])

    async def count(
        self, address: str, topic: str, partitions: Collection[int], freshness: Freshness
    ) -> tuple[int, AnswerAge]:
        """How many keys some partitions have."""
        answer = await self._ask(address, topic, "count", {"partitions": list(partitions)}, freshness)
        return answer["count"], AnswerAge.read(answer["seen"], answer["layout"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ---- look-ups that are sent together -------------------------------------------------------------

    async def _looked_up(
        self, address: str, topic: str, partition: int, key: bytes, layout: tuple[int, int]
    ) -> tuple[bytes | None, AnswerAge]:
        lookup = _Lookup(partition, key, layout, asyncio.get_running_loop().create_future())
        waiting = self._lookups.get((address, topic))
        if waiting is None:
            waiting = self._lookups[address, topic] = deque()
            task = asyncio.create_task(self._look_up(address, topic, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting.append(lookup)
        return await lookup.found

    async def _look_up(self, address: str, topic: str, waiting: deque[_Lookup]) -> None:
        """Send what waits for one instance, until nothing does."""
        while waiting:
            lookups = [waiting.popleft() for _ in range(min(len(waiting), _LOOKUPS_AT_ONCE))]
            try:
                await self._look_up_together(address, topic, lookups)
            except Exception as error:  # each request that waits gets it
                for lookup in lookups:
                    if not lookup.found.done():
                        lookup.found.set_exception(error)
        del self._lookups[address, topic]

    async def _look_up_together(self, address: str, topic: str, lookups: Sequence[_Lookup]) -> None:
        places: dict[int, list[int]] = {}
        for at, lookup in enumerate(lookups):
            places.setdefault(lookup.partition, []).append(at)
        try:
            freshness = Freshness(layout=max(lookup.layout for lookup in lookups))
            answers = await self._get(address, topic, [lookup.key for lookup in lookups], places, freshness)
        except Problem as problem:
            if problem.status != 413 or len(lookups) == 1:
                raise
            # Together their rows are too large. Those of one request are not, so each half is asked for by itself.
            middle = len(lookups) // 2
            await self._look_up_together(address, topic, lookups[:middle])
            await self._look_up_together(address, topic, lookups[middle:])
            return
        for partition, ats in places.items():
            answer = answers[partition]
            for turn, at in enumerate(ats):
                found = lookups[at].found
                if found.done():  # nobody waits for it any more
                    continue
                if answer is None:
                    found.set_exception(NotHereError([partition]))
                else:
                    found.set_result((answer[0][turn], answer[1]))

    # ---- requests ------------------------------------------------------------------------------------

    async def _get(
        self, address: str, topic: str, keys: Sequence[bytes], places: Mapping[int, Sequence[int]], freshness: Freshness
    ) -> dict[int, tuple[list[bytes | None], AnswerAge] | None]:
        """By partition, values and how old they are; None: it is not there."""
        used = sorted({at for ats in places.values() for at in ats})
        numbers = {at: number for number, at in enumerate(used)}
        wanted = [
            [partition, None if len(ats) == len(used) else [numbers[at] for at in ats]]
            for partition, ats in places.items()
        ]
        document = {"keys": [text_of(keys[at]) for at in used], "places": wanted}
        answers = await self._ask(address, topic, "get", document, freshness)
        return {
            partition: None
            if answer is None
            else (list(map(from_text, answer[0])), AnswerAge.read(answer[1], answers["layout"]))
            for partition, answer in zip(places, answers["places"], strict=True)
        }

    async def _ask(self, address: str, topic: str, what: str, document: dict[str, Any], freshness: Freshness) -> Any:
        if self._avoided.get(address, 0.0) > time.monotonic():
            raise UnreachableError(address)
        if self._session is None:
            self._session = self._connected()
        answer_s = (freshness.left_s if freshness.demands else 0.0) + _ANSWER_S
        # No limit for the whole answer: it may be large. A part of it must come within this time.
        timeout = aiohttp.ClientTimeout(None, connect=answer_s, sock_connect=_CONNECT_S, sock_read=answer_s)
        content = orjson.dumps({**document, "freshness": freshness.document()})
        path = f"/peer/{topic}/{what}"
        proof, nonce = self._secrets.proof(Asked(address, path, content))
        try:
            async with self._session.post(
                address + path, data=content, headers={HEADER: proof}, timeout=timeout, allow_redirects=False
            ) as response:
                body = await _body(address, response)
                if not self._secrets.is_answer(response.headers.get(HEADER, ""), nonce, response.status, body):
                    raise _not_proven(address, response, body)
                return _read(address, response, body)
        except UnreachableError as answered:
            self._warn(address, answered)
            raise
        except asyncio.TimeoutError as late:
            self._avoided[address] = time.monotonic() + _AVOIDED_S
            raise UnreachableError(address) from late
        except aiohttp.ClientSSLError as failed:
            next_step = "check the certificate of that instance, and --tls-authority of this one"
            unexpected = UnreachableError(address, f"cannot be asked with TLS ({failed})", next_step)
            self._warn(address, unexpected)
            raise unexpected from failed
        except aiohttp.ClientError as failed:
            raise UnreachableError(address) from failed

    def _warn(self, address: str, unexpected: UnreachableError) -> None:
        """Say that an instance cannot be used as it is: that does not end by itself, as when one is restarted."""
        now = time.monotonic()
        if now >= self._warned.get(address, now):
            self._warned[address] = now + _WARN_S
            log.warning("instance %s; next step: %s", unexpected, unexpected.next_step)

    def _connected(self) -> aiohttp.ClientSession:
        context = ssl.create_default_context(cafile=None if self._authority is None else str(self._authority))
        connector = aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_IDLE_S, ssl=context)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )


async def _body(address: str, response: aiohttp.ClientResponse) -> bytes:
    """What is answered. Something that is no instance may send without end."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _ANSWER_BYTES:
            raise UnreachableError(
                address,
                f"answers with more than {_ANSWER_BYTES:,} bytes",
                "check that there is an instance of this group at this address (--advertise)",
            )
    return b"".join(parts)


def _not_proven(address: str, response: aiohttp.ClientResponse, body: bytes) -> UnreachableError:
    """An answer without the proof that it is of an instance of this group. Nothing in it is believed."""
    if response.status == 503:  # an instance that has too much to do does not look at requests
        return UnreachableError(address)
    if response.status == 401:
        return UnreachableError(address, f"answers 401: {_detail(body)}", _STEPS[401])
    what = f"answers {response.status} without a proof that it is an instance of this group"
    return UnreachableError(address, what, f"{_STEPS[401]}; check that nobody else may join the group")


def _detail(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["detail"])[:300]
    except (KeyError, TypeError, ValueError):
        return "no reason is given"


def _read(address: str, response: aiohttp.ClientResponse, body: bytes) -> Any:
    try:
        if response.status == 200:
            answer = orjson.loads(body)
            if not isinstance(answer, dict):
                raise TypeError("an instance answers with an object")
            return answer
        if response.status == NOT_HERE:
            raise NotHereError(orjson.loads(body)["not_here"])
        if response.headers.get("content-type") != MEDIA_TYPE:
            raise ValueError("that is no answer of an instance")
        document = orjson.loads(body)
        detail = document["detail"]
    except (KeyError, TypeError, ValueError) as wrong:
        next_step = "check that there is an instance of this group at this address (--advertise)"
        raise UnreachableError(address, f"answers {response.status}, not as an instance does", next_step) from wrong
    if response.status == 404:
        raise UnreachableError(address, f"answers {response.status}: {detail}", _STEPS[response.status])
    more = {name: document[name] for name in ("position", "lag") if name in document}
    raise Problem(
        response.status,
        detail,
        next_step=document.get("next_step", ""),
        headers=age_headers(more),  # the proof does not cover the headers of the answer
        more=more,
    )
