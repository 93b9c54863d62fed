"""Parked records: what their headers say, what goes out again, and what the command makes of it."""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onceflow.admin.records import parked as parking
from onceflow.admin.records.parked import Parked
from onceflow.cli.main import cli, main
from onceflow.errors import OptionError
from onceflow.state.engine.retry import Retry
from onceflow.testing.processor_driver import ProcessorDriver

ORIGIN = "orders/3/17"


def parked(
    key: bytes | None, value: bytes | None, *more: tuple[str, bytes | None], origin: str = ORIGIN, named: bool = True
) -> Parked:
    """A record as `Retry` parks it; not ``named``: as earlier versions have, with the origin as key."""
    headers: list[Any] = [
        ("trace", b"x"),
        ("onceflow.error.class", b"KeyError"),
        ("onceflow.error.message", b"'card'\nmore"),
        ("onceflow.attempt", b"2"),
        *more,
    ]
    if key is not None:
        headers.append(("onceflow.key", key))
    driver = ProcessorDriver(Retry(retry_topic="retry", parked_topic="parked", permanent={"KeyError"}))
    (record,) = driver.send(origin, value, headers=headers, timestamp_ms=7)
    return Parked(
        origin,
        1,
        record.value,
        tuple(record.headers),
        record.timestamp_ms or 0,
        stored_key=record.key.encode() if named else None,
    )


@pytest.mark.parametrize("key", [None, b"", b"ada", b"\xff\x00"])
@pytest.mark.parametrize("value", [None, b"", b"order", b"\xff\x00"])
def test_key_and_value_are_those_of_the_record(key: bytes | None, value: bytes | None) -> None:
    record = parked(key, value)
    assert (record.key, record.value) == (key, value)
    assert record.stored is not None


def test_what_is_no_record_of_a_source_is_not_retried() -> None:
    record = parked(b"ada", b"{}", ("onceflow.timer.name", b"ring"), ("onceflow.timer.table", b"balances-3"))
    with pytest.raises(OptionError, match="is the letter of a timer") as caught:
        parking._target("parked", record, "orders")
    assert caught.value.detail == "onceflow.timer.name: ring, onceflow.timer.table: balances-3"
    with pytest.raises(OptionError, match="parts of it were cut"):
        parking._target("parked", parked(b"ada", b"{}", ("onceflow.shortened", b'{"value": 5}')), "orders")
    assert parking._target("parked", parked(b"ada", b"{}"), "orders") == "orders"


def test_what_the_headers_say() -> None:
    record = parked(b"ada", b"order")
    assert (record.attempt, record.cause, record.retry_topic) == (2, "KeyError", "retry")
    assert record.message == "'card'\nmore"


@pytest.mark.parametrize("attempt", [b"many", b"-1", b"", b"1" * 20, b"\xc2\xb2"])
def test_an_attempt_that_is_no_number_is_none(attempt: bytes) -> None:
    assert Parked(ORIGIN, 0, b"", [("onceflow.attempt", attempt)], 0).attempt == 0


def test_a_record_goes_out_as_it_came_and_its_attempts_begin_again() -> None:
    again = parked(b"ada", None, ("other", None)).again("elsewhere")
    assert (again.value, again.timestamp_ms) == (None, 7)
    headers = dict(again.headers or [])
    assert headers.keys() == {
        "trace",
        "other",
        "onceflow.error.class",
        "onceflow.error.message",
        "onceflow.origin.topic",
        "onceflow.origin.partition",
        "onceflow.origin.offset",
        "onceflow.retry.topic",
    }
    assert headers["onceflow.origin.offset"] == b"17"
    assert headers["onceflow.retry.topic"] == b"elsewhere"


def test_keys_of_a_topic_that_are_no_text_can_be_named_too() -> None:
    record = Parked(parking._text(b"\xff/0/1"), 0, b"", [], 0)
    assert record.raw_name == b"\xff/0/1"


@pytest.mark.parametrize(
    "key, origin, parked_there",
    [
        (b"orders/3/17", ORIGIN, True),
        (b"orders/3/17/0123456789abcdef", ORIGIN, True),
        (b"orders/3/17/0123456789abcdef", None, True),
        (b"orders/3/17/0123456789abcdef", "orders/3/18", False),
        (b"orders/3/17/0123456789ABCDEF", None, False),
        (b"orders/3/17/", None, False),
        (b"orders/3/17", None, True),  # a tombstone
        (b"orders/3/17", "orders/3/18", False),  # the letter of a record with a key that looks like an origin
        (b"ada", ORIGIN, False),
        (b"\xff/3/17", None, False),
    ],
)
def test_parked_records_and_letters_are_told_apart(key: bytes, origin: str | None, parked_there: bool) -> None:
    names = ("onceflow.origin.topic", "onceflow.origin.partition", "onceflow.origin.offset")
    parts = [] if origin is None else origin.encode().split(b"/")
    assert parking.is_parked(key, list(zip(names, parts, strict=bool(parts)))) is parked_there


@pytest.mark.parametrize("value", [None, b"", b"order"])
def test_a_letter_has_its_own_key_and_value(value: bytes | None) -> None:
    headers = [("onceflow.key", b"other"), ("onceflow.value.null", b"true")]
    letter = Parked(ORIGIN, 1, value, headers, 7, dead_letter=True, stored_key=b"ada")
    assert (letter.key, letter.value) == (b"ada", value)


# ---- the command -------------------------------------------------------------------------------------


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is parked in a topic, and what the command has asked for, without Kafka."""
    world: dict[str, Any] = {"records": [parked(b"ada", b"order"), parked(None, b"\xff", origin="orders/3/100")]}

    def read(settings: Any, name: str, origins: Collection[str] | None = None) -> list[Parked]:
        world["read"] = (settings.bootstrap_servers, settings.options, name, origins)
        return [each for each in world["records"] if origins is None or each.origin in origins]

    def retry(settings: Any, name: str, origins: Collection[str] | None, *, to: str | None = None) -> dict[str, int]:
        world["retried"] = (name, origins, to)
        return {to or "retry": len(origins or world["records"])} if world["records"] else {}

    def drop(settings: Any, name: str, origins: Collection[str] | None) -> int:
        world["dropped"] = (name, origins)
        return len(origins or world["records"])

    monkeypatch.setattr(parking, "read", read)
    monkeypatch.setattr(parking, "retry", retry)
    monkeypatch.setattr(parking, "drop", drop)
    return world


def call(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["parked", *arguments, "--bootstrap-servers", "localhost:1"], input=answer)


def test_list(topic: dict[str, Any]) -> None:
    answer = call("list", "parked", "--option", "client.id=me")
    assert answer.exit_code == 0, answer.output
    assert topic["read"] == ("localhost:1", {"client.id": "me"}, "parked", None)
    assert answer.stdout.splitlines() == [
        "ORIGIN        ATTEMPTS  WHY        CAUSE",
        "orders/3/17          2  permanent  KeyError: 'card'",
        "orders/3/100         2  permanent  KeyError: 'card'",
    ]


def test_list_as_json(topic: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in call("list", "parked", "--json").stdout.splitlines()]
    assert lines[0] == {
        "origin": ORIGIN,
        "name": topic["records"][0].name,
        "attempt": 2,
        "why": "permanent",
        "error": "KeyError",
        "message": "'card'\nmore",
        "retry_topic": "retry",
    }
    assert len(lines) == 2


def test_several_records_of_one_origin(topic: dict[str, Any]) -> None:
    """Rows that were made of one record; one was parked by an earlier version."""
    several = [parked(b"ada", b"1", named=False), parked(b"bob", b"22")]
    topic["records"] = [*several, parked(b"eve", b"3", origin="orders/3/100")]
    names = [line.split()[0] for line in call("list", "parked").stdout.splitlines()[1:]]
    assert names == [ORIGIN, several[1].name, "orders/3/100"]
    assert several[1].name.startswith(f"{ORIGIN}/")
    shown = call("show", "parked", ORIGIN).stdout
    assert [line for line in shown.splitlines() if line.startswith(("name", "value"))] == [
        "value      1",
        f"name       {several[1].name}",
        "value      22",
    ]
    lines = [json.loads(line) for line in call("show", "parked", ORIGIN, "--json").stdout.splitlines()]
    assert [line["key"] for line in lines] == ["ada", "bob"]
    parking._check_found("parked", [ORIGIN, several[1].name], [several])


def test_list_of_nothing(topic: dict[str, Any]) -> None:
    topic["records"] = []
    assert call("list", "parked", "--json").stdout == ""
    answer = call("list", "parked")
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert answer.stderr == "Nothing is parked in parked.\n"


def test_a_record_does_not_write_to_the_terminal(topic: dict[str, Any]) -> None:
    evil = parked(b"\x1b[2J", b"a\x1b[31m\nb", ("x\x07", b"\r"))
    topic["records"] = [
        Parked("or\x1bders", 0, evil.stored, [("onceflow.error.message", b"\x1b]0;"), *evil.headers], 7)
    ]
    for output in (call("list", "parked").stdout, call("show", "parked", "or\x1bders").stdout):
        assert "ders" in output
        assert not {c for c in output if not c.isprintable()} - {"\n", "\t"}


def test_show(topic: dict[str, Any]) -> None:
    answer = call("show", "parked", ORIGIN)
    assert answer.exit_code == 0, answer.output
    assert topic["read"][3] == [ORIGIN]
    lines = answer.stdout.splitlines()
    assert lines[0] == "origin     orders/3/17"
    assert "key        ada" in lines
    assert "header     onceflow.attempt = 2" in lines
    assert lines[-1] == "value      order"


def test_show_as_json(topic: dict[str, Any]) -> None:
    found = json.loads(call("show", "parked", "orders/3/100", "--json").stdout)
    assert found["key"] is None
    assert found["value_base64"] == "/w=="
    assert found["timestamp_ms"] == 7
    assert {"name": "trace", "value": "x"} in found["headers"]


def test_retry_some_and_all(topic: dict[str, Any]) -> None:
    answer = call("retry", "parked", ORIGIN, "orders/3/100", "--to", "elsewhere")
    assert topic["retried"] == ("parked", (ORIGIN, "orders/3/100"), "elsewhere")
    assert answer.stdout == "2 records went from parked to elsewhere.\n"
    assert call("retry", "parked", "--all").exit_code == 0
    assert topic["retried"] == ("parked", None, None)
    topic["records"] = []
    assert call("retry", "parked", "--all").stdout == "Nothing is parked in parked.\n"


def test_drop_asks(topic: dict[str, Any]) -> None:
    answer = call("drop", "parked", "--all", answer="n\n")
    assert answer.exit_code == 1
    assert "dropped" not in topic
    answer = call("drop", "parked", ORIGIN, answer="y\n")
    assert answer.exit_code == 0
    assert topic["dropped"] == ("parked", (ORIGIN,))
    assert answer.stdout.endswith("1 record dropped from parked.\n")
    call("drop", "parked", "--all", "--yes")
    assert topic["dropped"] == ("parked", None)


def test_a_no_is_no_interrupt(
    topic: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with pytest.raises(SystemExit) as ended:
        main(["parked", "drop", "parked", "--all", "--bootstrap-servers", "localhost:1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("onceflow: not confirmed, nothing was done\n")


@pytest.mark.parametrize("command", ["retry", "drop"])
@pytest.mark.parametrize("arguments", [[], [ORIGIN, "--all"]])
def test_some_or_all_must_be_said(topic: dict[str, Any], command: str, arguments: list[str]) -> None:
    answer = call(command, "parked", *arguments)
    assert answer.exit_code == 2
    assert "either ORIGIN... or --all" in answer.stderr


# ---- what is refused ---------------------------------------------------------------------------------


def test_retries_need_to_go_somewhere_else() -> None:
    assert parking._target("parked", parked(b"ada", b""), None) == "retry"
    assert parking._target("parked", parked(b"ada", b""), "elsewhere") == "elsewhere"
    with pytest.raises(OptionError, match="--to"):
        parking._target("parked", Parked(ORIGIN, 0, b"", [], 0), None)
    with pytest.raises(OptionError, match="parked in"):
        parking._target("parked", parked(b"ada", b""), "parked")


def test_records_are_listed_in_the_order_of_their_origins() -> None:
    origins = ["b/0/1", "a/10/1", "a/9/100", "a/9/20", "strange", "a/9/x"]
    assert sorted(origins, key=parking._order) == ["a/9/x", "a/9/20", "a/9/100", "a/10/1", "b/0/1", "strange"]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(OptionError, match=r"a/0/1 \(and 1 others\) is not parked in parked"):
        parking._check_found("parked", ["a/0/1", ORIGIN, "a/0/2", "a/0/1"], [[parked(b"ada", b"")]])
