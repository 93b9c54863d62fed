"""Requests of other instances, and of whoever pretends to be one: small ones make no large answers, and little work."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.server.local import LocalTable, Room
from onceflow.server.options import Limits
from onceflow.server.peer_auth import HEADER, Asked, PeerSecrets
from onceflow.server.peer_requests import answer_peer, text_of
from onceflow.server.problems import Problem
from onceflow.server.routed import RoutedTable
from onceflow.server.routes import Routes, TableRoutes
from onceflow.server.staleness import Freshness
from onceflow.state.format import rows
from onceflow.tables.layout import Layout

LARGE = b"x" * 100_000
LIMITS = Limits(answer_bytes=1_000_000, lookups=1_000)
PARTITIONS = 4


class Store:
    """Each key has a large value. It counts what is read."""

    def __init__(self) -> None:
        self.read = 0

    def get(self, row_key: bytes) -> bytes | None:
        self.read += 1
        return rows.pack(LARGE)

    def get_many(self, row_keys: list[bytes]) -> list[bytes | None]:
        return [self.get(each) for each in row_keys]


class Share:
    topic, topic_id, failure, placed, partitions_now, partitions = "t", "id", None, True, PARTITIONS, PARTITIONS

    def __init__(self) -> None:
        self.stores = [Store() for _ in range(PARTITIONS)]
        self.layout = Layout()

    def progress(self, partition: int) -> Any:
        if partition >= PARTITIONS:
            return None
        lag = SimpleNamespace(records=0, ms=0)
        return SimpleNamespace(position=5, lag=lag, emptied=False, incomplete=False, restored=True)

    def store(self, partition: int) -> Any:
        return self.stores[partition]


SECRETS = PeerSecrets(["a-secret-of-the-tests"])
HERE = "http://a"


def service_of(share: Any, secrets: PeerSecrets | None = SECRETS) -> Any:
    local = LocalTable(share)
    return SimpleNamespace(
        table=lambda _: SimpleNamespace(local=local), limits=LIMITS, secrets=secrets, routes=Routes(HERE)
    )


class Request:
    def __init__(self, content: bytes, proof: str) -> None:
        self.headers = {HEADER: proof}
        self.content = content

    async def body(self) -> bytes:
        return self.content


def asked(body: Any, what: str = "get", *, secrets: PeerSecrets | None = SECRETS) -> tuple[int, bytes, int]:
    """The status and the body of the answer, and how many rows were read for it."""
    share: Any = Share()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    proof, nonce = SECRETS.proof(Asked(HERE, f"/peer/t/{what}", content))
    request: Any = Request(content, proof)
    try:
        answer = asyncio.run(answer_peer(service_of(share, secrets), "t", what, request))
        found = answer.status_code, bytes(answer.body)
        assert SECRETS.is_answer(answer.headers[HEADER], nonce, *found)
    except Problem as problem:
        found = problem.status, problem.response().body
    return *found, sum(store.read for store in share.stores)


FRESHNESS = {"least": [], "staleness_ms": None, "wait_s": 0, "topic_id": "id", "layout": [0, 0]}
KEYS = [text_of(b"k%d" % n) for n in range(30)]


def test_what_another_instance_asks() -> None:
    status, body, read = asked({"keys": KEYS[:3], "places": [[0, [0, 1]], [2, None]], "freshness": FRESHNESS})
    assert (status, read) == (200, 5)
    first, second = json.loads(body)["places"]
    assert [len(first[0]), len(second[0])] == [2, 3]
    assert asked({"keys": KEYS[:1], "places": [[0, None]], "freshness": FRESHNESS}, secrets=None)[0] == 404


@pytest.mark.parametrize(
    "places, status",
    [
        ([[0, [0] * 5_000]], 413),  # too many look-ups
        ([[0, [0] * 900]], 413),  # one row 900 times
        ([[0, None], [1, None], [2, None], [3, None]], 413),  # 120 rows
        ([[0, [0]], [0, [0]]], 400),
        ([[-1, [0]]], 400),
        ([[True, [0]]], 400),
        ([[0, [-1]]], 400),
        ([[0, [True]]], 400),
        ([[0, [99]]], 400),
        ([[[], [0]]], 400),
        ([[0, 1]], 400),
        ([[0, {"0": 1}]], 400),
        ([[0, "00"]], 400),
    ],
)
def test_small_requests_with_large_answers(places: Any, status: int) -> None:
    """30 kB ended the server for want of memory, 5 kB blocked it for seconds."""
    found, body, read = asked({"keys": KEYS, "places": places, "freshness": FRESHNESS})
    assert found == status
    assert len(body) < 1_000
    assert read <= 64


@pytest.mark.parametrize("what", ["page", "count"])
@pytest.mark.parametrize("partitions", [1, "0", [[]], [-1], [True], {"0": 1}, [0, "1"]])
def test_partitions_that_are_none(what: str, partitions: Any) -> None:
    document = {"partitions": partitions, "low": "", "high": None, "reverse": False, "limit": 5, "freshness": FRESHNESS}
    assert asked(document, what)[0] == 400


ODD = st.one_of(st.integers(-2, 40), st.booleans(), st.none(), st.text(max_size=2), st.floats(), st.just(1 << 70))
ATS = st.one_of(st.none(), st.lists(st.integers(0, 40), max_size=3).map(lambda ats: ats * 300), st.lists(ODD), ODD)


@settings(max_examples=300, deadline=None, derandomize="CI" in os.environ)
@given(
    keys=st.one_of(st.lists(st.sampled_from([*KEYS, "?", 1]), max_size=40), ODD),
    places=st.one_of(st.lists(st.one_of(st.tuples(st.one_of(st.integers(0, 5), ODD), ATS), ODD), max_size=40), ODD),
)
def test_made_up_requests(keys: Any, places: Any) -> None:
    status, body, read = asked(json.dumps({"keys": keys, "places": places, "freshness": FRESHNESS}).encode())
    assert status in (200, 400, 413)
    assert len(body) < 1.5 * LIMITS.answer_bytes
    assert read < 400


def test_one_row_always_fits() -> None:
    room = Room(10)
    room.take(None)
    room.take(b"x" * 100)
    with pytest.raises(Problem, match="more than 10 bytes"):
        room.take(b"x")


def table(placed: bool = True) -> tuple[RoutedTable, Any]:
    share: Any = Share()
    share.placed = placed
    routes = Routes("http://a", {"t": TableRoutes([["http://a"]] * PARTITIONS)})
    return RoutedTable("t", LocalTable(share), routes, None, LIMITS), share


def test_many_keys_whose_rows_are_too_large() -> None:
    routed, share = table()
    keys = [b"k%d" % n for n in range(1_000)]
    with pytest.raises(Problem, match="more than 1,000,000 bytes"):
        asyncio.run(routed.get_many(keys, Freshness()))
    assert sum(store.read for store in share.stores) <= 64
    found, _ = asyncio.run(routed.get_many(keys[:9], Freshness()))
    assert found == [LARGE] * 9


def test_many_keys_that_may_be_in_any_partition() -> None:
    routed, share = table(placed=False)
    with pytest.raises(Problem, match="at most 250 can be looked for at a time"):
        asyncio.run(routed.get_many([b"k%d" % n for n in range(300)], Freshness()))
    assert sum(store.read for store in share.stores) == 0
