"""The processors without Spark and Kafka, both flows without Kafka; at the end once on a real one, killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from retry import NEVER_RETRIED, Charge, ask_provider, charge_flow, checked, retry_flow

import onceflow
from onceflow import Record
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver

ORDER = {"id": "ord-1", "amount": 1999, "at": 1_750_000_000_000, "card": "ok"}


def charge() -> ProcessorDriver:
    return ProcessorDriver(Charge(), on_error="dead-letter")


def retry() -> ProcessorDriver:
    policy = onceflow.Retry(retry_topic="retry", parked_topic="parked", base=1, ceiling=3, jitter=0, max_attempts=4)
    return ProcessorDriver(policy)


def dead_letter_headers(driver: ProcessorDriver) -> dict[str, bytes | None]:
    """Of the last dead letter."""
    return dict(driver.dead_letters[-1].headers)


# ---- charge ------------------------------------------------------------------------------------------


def test_an_order_is_charged() -> None:
    driver = charge()
    receipt = {"id": "ord-1", "amount": 1999, "attempt": 1}
    assert driver.send(b"ord-1", ORDER) == [Record(b"ord-1", receipt)]
    assert driver.state(b"ord-1") == receipt


def test_an_order_is_charged_once() -> None:
    driver = charge()
    assert len(driver.send_many([(b"ord-1", ORDER), (b"ord-1", ORDER)])) == 1
    assert driver.send(b"ord-1", ORDER) == []
    assert [dict(each.headers)["onceflow.error.class"] for each in driver.dead_letters] == [b"AlreadyChargedError"] * 2


def test_a_failure_is_a_dead_letter_and_charges_nothing() -> None:
    driver = charge()
    assert driver.send(b"ord-1", {**ORDER, "card": "busy-1"}) == []
    assert driver.states == {}
    headers = dead_letter_headers(driver)
    assert headers["onceflow.error.class"] == b"ConnectionError"
    assert headers["onceflow.attempt"] == b"1"
    assert b"ask_provider" in (headers["onceflow.error.stack"] or b"")


def test_the_attempt_header_counts_on() -> None:
    driver = charge()
    order = {**ORDER, "card": "slow-2"}
    driver.send(b"ord-1", order, headers=[("onceflow.attempt", b"1")])
    assert dead_letter_headers(driver)["onceflow.attempt"] == b"2"
    (receipt,) = driver.send(b"ord-1", order, headers=[("onceflow.attempt", b"2")])
    assert receipt.value["attempt"] == 3


@pytest.mark.parametrize(
    "card, fails", [("ok", []), ("busy-1", [1]), ("slow-3", [1, 2, 3]), ("down", [1, 2, 3, 4, 5]), ("declined", [1, 5])]
)
def test_how_the_provider_answers(card: str, fails: list[int]) -> None:
    for attempt in range(1, 6):
        if attempt in fails:
            with pytest.raises(Exception, match=r"attempt|declined"):
                ask_provider(card, attempt)
        elif card != "declined":
            ask_provider(card, attempt)


@pytest.mark.parametrize(
    "value, error",
    [
        (b"", "JSONDecodeError"),
        (b"\xff", "JSONDecodeError"),
        (b"[" * 5000, "JSONDecodeError"),
        (None, "TypeError"),
        (b"null", "TypeError"),
        (b"{}", "KeyError"),
        ({**ORDER, "amount": "1"}, "TypeError"),
        ({**ORDER, "amount": True}, "TypeError"),
        ({**ORDER, "amount": 0}, "ValueError"),
        ({**ORDER, "at": -1}, "ValueError"),
        ({**ORDER, "at": 2**63}, "ValueError"),
        (b'{"id": "a", "amount": 1' + b"0" * 400 + b', "at": 1, "card": "ok"}', "JSONDecodeError"),
        (b'{"id": "a", "amount": 1' + b"0" * 40 + b', "at": 1, "card": "ok"}', "ValueError"),
        ({**ORDER, "card": "?" * 300_000}, "ValueError"),
    ],
)
def test_bad_records_are_dead_letters_with_their_cause(value: Any, error: str) -> None:
    driver = charge()
    assert driver.send(b"ord-1", value) == []
    headers = dead_letter_headers(driver)
    assert headers["onceflow.error.class"] == error.encode()
    assert error.encode() in (headers["onceflow.error.stack"] or b"")
    # No retry heals them: they are parked at once.
    assert error in NEVER_RETRIED


def test_records_without_a_key_are_dead_letters() -> None:
    driver = charge()
    assert driver.send(None, ORDER) == []
    assert driver.dead_letters[0].key is None
    assert dead_letter_headers(driver)["onceflow.error.class"] == b"ValueError"


def test_an_order_is_checked() -> None:
    assert checked({**ORDER, "more": 1})["id"] == "ord-1"


# ---- retry -------------------------------------------------------------------------------------------


def test_what_failed_comes_back_when_nothing_else_arrives() -> None:
    driver = retry()
    driver.send("orders/0/7", b"order", headers=[("onceflow.attempt", b"1"), ("onceflow.key", b"ord-1")])
    assert driver.advance(0.999) == []
    (found,) = driver.advance(0.001)
    assert (found.key, found.value, found.topic) == ("ord-1", b"order", "retry")


@pytest.mark.integration
def test_all_of_it(onceflow_spark: Any) -> None:
    """Both flows, on topics in memory: an order that fails twice, one that always fails, and one that never will do."""
    flows = FlowDriver(charge_flow, retry_flow)
    for key, card in (("twice", "slow-2"), ("never", "down"), ("no", "declined")):
        flows.send("orders", key, {**ORDER, "id": key, "card": card})
    assert flows.read("charged") == []
    assert [each.key.rpartition("/")[0] for each in flows.read("parked")] == ["orders/0/2"]  # at once
    for _ in range(20):
        flows.advance(1)
    assert flows.read("charged") == [Record("twice", {"id": "twice", "amount": 1999, "attempt": 3})]
    assert flows.table("charges") == {"twice": {"id": "twice", "amount": 1999, "attempt": 3}}
    (_, given_up) = flows.read("parked")
    assert given_up.key.startswith("orders/0/1/")
    assert dict(given_up.headers)["onceflow.attempt"] == b"4"
    assert flows.table("waiting") == {}


# ---- on a real Kafka ---------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_every_order_ends_in_one_place_whoever_is_killed(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("retry", records=2000, kills=1)
    assert result["in"] == result["out"] == 2000
    assert result["parked"] > 0
    assert result["retried"] > 100
    assert result["dead_letters"] == result["retried"] + result["parked"]
    assert result["too_early"] == 0
    assert result["kills"] == 2


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_more_of_it(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("retry", records=10_000, kills=3)
    assert result["in"] == result["out"] == 10_000
    assert result["kills"] == 6
