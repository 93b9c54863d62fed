"""What the query server says about requests that it cannot answer, without Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from onceflow.client.settings import ClientSettings
from onceflow.errors import UnknownTopicError
from onceflow.server.app import make_app
from onceflow.server.formats import Format
from onceflow.server.local import NotHereError
from onceflow.server.options import Limits
from onceflow.server.problems import Problem, unavailable
from onceflow.server.requests import check_query
from onceflow.server.routed import RoutedTable, UnreachableError
from onceflow.server.routes import Routes, TableRoutes
from onceflow.server.service import Served, Service
from onceflow.server.staleness import AnswerAge, Freshness

Rows = list[tuple[bytes, bytes]]
ROWS: Rows = [(b"", b"1"), (b"a", b"2"), (b"b", b"3")]


class Routed:
    """A table of three rows that is here."""

    placed = True

    async def range(
        self, low: bytes, high: bytes | None, freshness: Freshness, *, reverse: bool, page_rows: int
    ) -> tuple[AsyncIterator[Rows], AnswerAge]:
        found = [row for row in ROWS if row[0] >= low and (high is None or row[0] < high)]

        async def pages() -> AsyncIterator[Rows]:
            if found:
                yield found[::-1] if reverse else found

        return pages(), AnswerAge({0: 3}, 0, 0)

    async def get_many(self, keys: list[bytes], freshness: Freshness) -> tuple[list[bytes | None], AnswerAge]:
        return [None] * len(keys), AnswerAge({}, 0, 0)

    async def count(self, freshness: Freshness) -> tuple[int, AnswerAge]:
        return len(ROWS), AnswerAge({0: 3}, 0, 0)


async def _end() -> None:
    pass


def asked(method: str, path: str, *, key: str = "text", **more: Any) -> httpx.Response:
    """The answer to one request at a table with such keys."""
    share: Any = SimpleNamespace(failure=None)
    routed: Any = Routed()
    table = Served("t", share, share, routed, Format.of(key, "json"))
    routes = Routes("http://a", {"t": TableRoutes([["http://a"]])})
    service = Service({"t": table}, routes, Limits(), ClientSettings("127.0.0.1:1"), list)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service, _end))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.request(method, f"/tables/t/{path}", **more)

    return asyncio.run(ask())


def _keys(text: str) -> str:
    return f'{{"keys": [{text}]}}'


def refused(method: str, path: str, *, key: str = "text", **more: Any) -> tuple[str, str]:
    answer = asked(method, path, key=key, **more)
    assert answer.status_code == 400, answer.text
    return answer.json()["detail"], answer.json()["next_step"]


@pytest.mark.parametrize(
    "path, name, next_step",
    [
        ("count?limit=3", "limit", "it has max_staleness, min_position, wait"),
        ("count?min_positon=t:3", "min_positon", "did you mean min_position?"),
        ("range?since=t:3", "since", "it has cursor, end, key_encoding, limit, max_staleness, min_position, prefix"),
        ("changes?limit=3", "limit", "it has key_encoding, prefix, since, value_encoding"),
        ("changes?start=a", "start", "it has key_encoding, prefix, since, value_encoding"),
    ],
)
def test_a_parameter_that_a_request_does_not_have(path: str, name: str, next_step: str) -> None:
    """What is offered is a parameter of this request, and another one than was given."""
    detail, offered = refused("GET", path)
    assert detail == f"This request has no parameter {name!r}"
    assert offered.startswith(next_step)


@pytest.mark.parametrize("name", ["start", "end", "prefix", "cursor"])
def test_parameters_that_are_not_utf8(name: str) -> None:
    for path in (f"range?{name}=%ff", f"range?limit=2&{name}=a%ed%a0%80"):
        detail, next_step = refused("GET", path)
        assert detail == f"The parameter {name} is not UTF-8"
        assert "key_encoding=base64url" in next_step
    assert asked("GET", f"range?{name}=k.%c3%bc").status_code == (400 if name == "cursor" else 200)


def test_a_prefix_of_changes_that_is_not_utf8() -> None:
    assert refused("GET", "changes?prefix=%ff")[0] == "The parameter prefix is not UTF-8"


def test_bytes_that_are_not_percent_encoded() -> None:
    """Frameworks read them as Latin-1, so that another key would be looked for."""
    with pytest.raises(Problem, match="percent-encoded") as caught:
        check_query({"query_string": "start=\u00fc".encode()})
    assert caught.value.status == 400
    check_query({"query_string": b"start=%C3%BC"})


def test_cursors_are_never_empty() -> None:
    found: list[str] = []
    cursor: str | None = None
    while True:
        document = asked("GET", "range", params={"limit": 1, **({} if cursor is None else {"cursor": cursor})}).json()
        found += [row["key"] for row in document["rows"]]
        cursor = document["cursor"]
        if not cursor:
            break
    assert cursor is None
    assert found == ["", "a", "b"]
    lines = asked("GET", "range?limit=1", headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert '"cursor":"k."' in lines[-1]
    for wrong in ("", "YQ", "k.%25"):
        assert "is not a cursor" in refused("GET", f"range?cursor={wrong}")[0]


def test_ranges_of_numbers() -> None:
    detail, next_step = refused("GET", "range?start=-5&end=5", key="long")
    assert "start=-5 comes after end=5 in the order of the keys' bytes" in detail
    assert "negative numbers come after positive ones" in detail
    assert next_step == "ask once with this start and no end, and once with this end and no start"
    assert refused("GET", "range?start=7&end=5", key="long")[1].startswith("start comes first")
    for right in ("start=5&end=-5", "start=-7&end=-5", "start=5&end=5", "end=5", "start=-5"):
        assert asked("GET", f"range?{right}", key="long").status_code == 200, right
    # The order of text is what one sees.
    assert asked("GET", "range?start=b&end=a").json()["rows"] == []


@pytest.mark.parametrize("path", ["range", "changes"])
def test_numbers_have_no_prefixes(path: str) -> None:
    detail, next_step = refused("GET", f"{path}?prefix=5", key="long")
    assert detail == "Keys that are long have no prefixes: they are numbers"
    assert "start and end" in next_step
    assert asked("GET", "range?prefix=AAAA&key_encoding=base64url", key="long").status_code == 200


@pytest.mark.parametrize(
    "body, what, why",
    [
        ("true", "true", "it is no 64-bit integer"),
        ("null", "null", "it is no 64-bit integer"),
        ("1.0", "1.0", "it is no 64-bit integer"),
        ("99999999999999999999", "99999999999999999999", "it is beyond the 64-bit integers"),
        ("9223372036854775808", "9223372036854775808", "it is beyond the 64-bit integers"),
        ('"99999999999999999999"', '"99999999999999999999"', "it is beyond the 64-bit integers"),
        ('"' + 5000 * "9" + '"', None, "it is beyond the 64-bit integers"),
        ('"x"', '"x"', "it is no integer in decimal digits"),
        ('"1_0"', '"1_0"', "it is no integer in decimal digits"),
        ('{"a":[null]}', '{"a":[null]}', "it is no 64-bit integer"),
    ],
)
def test_what_is_no_number(body: str, what: str | None, why: str) -> None:
    detail, next_step = refused("POST", "multi-get", key="long", content=_keys(body))
    assert detail.startswith("The key " if what is None else f"The key {what} is not long: ")
    assert detail.endswith(f" is not long: {why}")
    assert next_step == 'give 64-bit integers, for example 7 or -7, or "7" in JSON'


@pytest.mark.parametrize(
    "body, kind",
    [
        ("7", "a number"),
        ("1.5", "a number"),
        ("true", "a boolean"),
        ("null", "null"),
        ("[]", "a list"),
        ("{}", "an object"),
    ],
)
def test_what_is_no_text(body: str, kind: str) -> None:
    detail, next_step = refused("POST", "multi-get", content=_keys(body))
    assert detail == f"The key {body} is not text: it is {kind}"
    assert "quotes" in next_step
    detail, next_step = refused("POST", "multi-get", key="base64", content=_keys(body))
    assert detail == f"The key {body} is not base64url: it is {kind}"
    assert "base64url" in next_step


@pytest.mark.parametrize("levels", [200, 300, 995, 1010, 1100])
@pytest.mark.parametrize("inner", ["1", "1.00000000000000000001", "1e-400", '"\\ud800"'])
def test_a_body_that_is_nested_deeply_is_a_bad_request(levels: int, inner: str) -> None:
    for body in (_keys(levels * "[" + inner + levels * "]"), levels * '{"keys":' + inner + levels * "}"):
        refused("POST", "multi-get", content=body)


def test_a_number_beyond_those_that_are_written_is_no_text() -> None:
    detail, _ = refused("POST", "multi-get", content=_keys("15" + 307 * "0"))
    assert "is not text: it is a number" in detail


def test_an_empty_position_demands_nothing() -> None:
    """It is that of an answer about no key."""
    answer = asked("POST", "multi-get", content='{"keys": []}').json()
    assert (answer["rows"], answer["position"]) == ([], "")
    assert asked("GET", "count", params={"min_position": answer["position"]}).json()["count"] == 3


def test_a_deleted_key_is_marked() -> None:
    """A null of JSON is a value."""
    assert Format().item(b"k", None) == {"key": "k", "value": None, "deleted": True}
    assert Format().item(b"k", b"null").keys() == {"key", "value"}
    assert Format.of("long", "json").item(b"k", None).keys() == {"key", "key_base64", "value", "deleted", "error"}


def test_a_topic_that_was_created_again_needs_a_restart() -> None:
    failure = UnknownTopicError("It was created again", next_step="start again")
    assert unavailable(failure).next_step.startswith("restart this instance")
    table = Served("t", SimpleNamespace(failure=failure), None, None, Format())  # type: ignore[arg-type]
    (why,) = table.waits_for(Routes("http://a"), trusted=True)
    assert "; restart this instance" in why


# ---- partitions that nobody answers for ---------------------------------------------------------------


class Nothing:
    """An instance without any partition."""

    placed = True
    layout = (0, 0)

    def hear(self, layout: tuple[int, int]) -> None:
        assert layout == (0, 0)

    def lacks_rows(self, partition: int) -> bool:
        return False

    def has(self, partition: int, *, restored: bool = False) -> bool:
        return False

    def emptied(self, partition: int) -> bool:
        return False

    async def wait(self, partitions: Collection[int], freshness: Freshness) -> AnswerAge:
        raise NotHereError(partitions)


class Refusing:
    """Another instance that answers as if this one were no instance of the group."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def count(
        self, address: str, topic: str, partitions: Collection[int], freshness: Freshness
    ) -> tuple[int, AnswerAge]:
        raise self._error


def nobody(peers: Refusing | None) -> tuple[str, str]:
    local: Any = Nothing()
    others: Any = peers
    here = "http://a" if peers is None else "http://b"
    table = RoutedTable("t", local, Routes("http://a", {"t": TableRoutes([[here]])}), others)
    with pytest.raises(Problem) as caught:
        asyncio.run(table.count(Freshness()))
    assert caught.value.status == 503
    return caught.value.detail, caught.value.next_step


def test_why_another_instance_is_no_help() -> None:
    detail, next_step = nobody(Refusing(UnreachableError("http://b", "answers 401: no token", "give a common token")))
    assert detail == "No instance that answers has partition 0 of table t: http://b answers 401: no token"
    assert next_step == "give a common token"
    for error in (UnreachableError("http://b"), NotHereError([0])):
        detail, next_step = nobody(Refusing(error))
        assert detail == "No instance that answers has partition 0 of table t"
        assert next_step == "ask again: another instance takes it over"


def test_a_single_instance_promises_no_other_one() -> None:
    detail, next_step = nobody(None)
    assert detail == "Partition 0 of table t is not open"
    assert "another instance" not in next_step
