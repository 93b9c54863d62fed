"""The flows and the form: in milliseconds with a service of the test, and at the end on a real broker."""

from __future__ import annotations

import functools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from form import make_app, make_producer, written
from outbox import (
    WATCH_MS,
    BusyError,
    DeclinedError,
    Intend,
    Pay,
    Watch,
    charge,
    intend_flow,
    pay_flow,
    pay_once,
    pay_once_flow,
    watch_flow,
)

import onceflow
from onceflow import Record, serdes
from onceflow.testing import independent
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos.outbox_server import PaymentServer

REQUEST = {"account": "acc-1", "amount": 1999, "card": "ok"}


def pay(call: Callable[[dict[str, Any], str], str]) -> ProcessorDriver:
    return ProcessorDriver(Pay(call, "repeated"), on_error="dead-letter")


def classes(driver: ProcessorDriver) -> list[bytes | None]:
    return [dict(each.headers)["onceflow.error.class"] for each in driver.dead_letters]


def test_a_double_click_pays_once() -> None:
    calls: list[str] = []
    driver = pay(lambda request, key: calls.append(key) or f"ch-{len(calls)}")
    first, second = driver.send_many([("token", REQUEST), ("token", REQUEST)])
    assert first == Record("token", {"amount": 1999, "receipt": "ch-1"})
    assert (second.topic, second.value) == ("repeated", REQUEST)
    [third] = driver.send("token", REQUEST)  # later: the state is committed
    assert third.topic == "repeated"
    assert calls == ["token"]


def test_another_payment_with_the_same_token_is_refused() -> None:
    driver = pay(lambda request, key: "ch-1")
    driver.send("token", REQUEST)
    assert driver.send("token", {**REQUEST, "amount": 5}) == []
    assert classes(driver) == [b"ConflictError"]


def test_bad_requests_are_not_called_for() -> None:
    calls: list[str] = []
    driver = pay(lambda request, key: calls.append(key) or "ch-1")
    for value in (b"no JSON", [], {"account": "a"}, {**REQUEST, "amount": 0}, {**REQUEST, "amount": True}, None):
        assert driver.send("token", value) == []
    assert classes(driver) == [b"JSONDecodeError", b"TypeError", b"KeyError", b"ValueError", b"TypeError", b"TypeError"]
    assert calls == []


@pytest.mark.parametrize("card", ["ok", "busy", "reset", "lost"])
def test_a_service_that_fails_charges_once(card: str) -> None:
    with PaymentServer().serving() as server:
        driver = pay(functools.partial(charge, server.url))
        [receipt] = driver.send("token", {**REQUEST, "card": card})
        assert receipt.value == {"amount": 1999, "receipt": "ch-000001"}
        assert len(server.charges) == 1
        assert server.requests["acc-1"] == {"ok": 1, "busy": 3, "reset": 2, "lost": 2}[card]


@pytest.mark.parametrize("card, error, requests", [("declined", b"DeclinedError", 1), ("down", b"BusyError", 4)])
def test_what_cannot_be_charged(card: str, error: bytes, requests: int) -> None:
    with PaymentServer().serving() as server:
        driver = pay(functools.partial(charge, server.url))
        assert driver.send("token", {**REQUEST, "card": card}) == []
        assert classes(driver) == [error]
        assert driver.states == {}
        assert (server.charges, server.requests["acc-1"]) == ([], requests)


# ---- without idempotency keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "card, status, charged",
    [("ok", "paid", 1), ("declined", "not paid", 0), ("down", "not paid", 0), ("reset", "unclear", 0),
     ("lost", "unclear", 1)],
)  # fmt: skip
def test_one_attempt_and_what_is_known_of_it(card: str, status: str, charged: int) -> None:
    with PaymentServer().serving() as server:
        result = pay_once(server.url, Record(b"token", {**REQUEST, "card": card}))
        assert result["status"] == status
        assert (len(server.charges), server.requests["acc-1"]) == (charged, 1)


def test_an_intent_passes_once() -> None:
    driver = ProcessorDriver(Intend("repeated"))
    first, second = driver.send_many([("token", {**REQUEST, "click": 1}), ("token", {**REQUEST, "click": 2})])
    assert first == Record("token", REQUEST)
    assert second.topic == "repeated"


def test_what_has_no_sure_result_is_listed() -> None:
    driver = ProcessorDriver(Watch("unclear"))
    for token in ("paid", "lost", "silent"):
        driver.send(token, REQUEST)
    driver.send("paid", {"status": "paid", "receipt": "ch-1"})
    driver.send("early", {"status": "paid", "receipt": "ch-2"})
    driver.send("early", REQUEST)
    assert [each.key for each in driver.send("lost", {"status": "unclear", "cause": "TimeoutError"})] == ["lost"]
    driver.take()
    assert driver.advance(60) == [Record("silent", {"status": "unclear", "cause": "no result"}, "unclear")]
    assert driver.timers == []
    assert driver.send("silent", {"status": "paid", "receipt": "ch-3"}) == [Record("silent", None, "unclear")]


def test_errors_say_what_is_known() -> None:
    with PaymentServer().serving() as server:
        with pytest.raises(DeclinedError):
            charge(server.url, {**REQUEST, "card": "declined"}, None)
        with pytest.raises(BusyError, match="503"):
            charge(server.url, {**REQUEST, "card": "down"}, None)


# ---- the form --------------------------------------------------------------------------------------------


class Unsure:
    """A producer that does not hear of its records."""

    def produce(self, *_: Any, on_delivery: Callable[[Any, Any], None]) -> None:
        on_delivery("timed out", None)

    def flush(self, seconds: float) -> None:
        pass


@contextmanager
def browser(producer: Any, topic: str, paid: Any) -> Iterator[httpx.Client]:
    """A client of the web server, which runs in a thread."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(producer, topic, paid), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=20, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


def test_the_form_checks_what_it_gets() -> None:
    with browser(Unsure(), "payments", {}) as client:
        _check_form(client)


def _check_form(client: httpx.Client) -> None:
    tokens = {re.findall('name="token" value="([^"]+)"', client.get("/").text)[0] for _ in range(3)}
    assert len(tokens) == 3, "a form has a token of its own"
    good = {"token": tokens.pop(), "account": "acc-1", "amount": "1999", "card": "ok"}
    for wrong in ({"token": "x"}, {"amount": "much"}, {"account": ""}):
        assert client.post("/payments", data={**good, **wrong}).status_code == 422
    unsure = client.post("/payments", data=good)
    assert (unsure.status_code, "pay once" in unsure.text) == (503, True)


def test_two_clicks_at_the_same_time_and_a_retry_pay_once(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    payments, receipts, repeated = (make_topic(name, 2) for name in ("payments", "receipts", "repeated"))
    rows: dict[str, Any] = {}
    producer = make_producer(onceflow_broker)
    with PaymentServer().serving() as server, browser(producer, payments, rows) as client:
        token = re.findall('name="token" value="([^"]+)"', client.get("/").text)[0]
        fields = {"token": token, "account": "acc-1", "amount": "1999", "card": "lost"}
        together = threading.Barrier(2)

        def click(_: int) -> Any:
            together.wait(10)
            return client.post("/payments", data=fields)

        with ThreadPoolExecutor(2) as people:
            answers = list(people.map(click, range(2)))
        answers.append(client.post("/payments", data=fields))  # the browser has not got the answer
        assert {(answer.status_code, answer.headers["location"]) for answer in answers} == {(303, f"/payments/{token}")}
        assert "being processed" in client.get(f"/payments/{token}").text
        with onceflow.Flow(f"pay-{payments}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
            step = Pay(functools.partial(charge, server.url), repeated)
            paid = flow.process(flow.read(payments), step, table=f"paid-{payments}", state_dir=tmp_path)
            flow.write(paid, topic=receipts, once=True).start().awaitTermination(60)
        assert len(server.charges) == 1
        assert server.requests["acc-1"] == 2, "its answer was lost"
        found = list(independent.read_topic(onceflow_broker, receipts))
        assert [json.loads(each.value or b"") for each in found] == [{"amount": 1999, "receipt": "ch-000001"}]
        assert len(list(independent.read_topic(onceflow_broker, repeated))) == 2
        with onceflow.Table(
            f"paid-{payments}", bootstrap_servers=onceflow_broker, key=serdes.STRING, value=serdes.JSON
        ) as table:
            rows[token] = table.get(token)
        assert "Paid. Receipt ch-000001." in client.get(f"/payments/{token}").text


def test_a_record_that_is_not_acknowledged() -> None:
    assert not written(Unsure(), "payments", "token", REQUEST)


# ---- the flows, on topics in memory ----------------------------------------------------------------------


@pytest.mark.integration
def test_a_token_pays_once(onceflow_spark: Any) -> None:
    with PaymentServer().serving() as server:

        def pay_here(flow: onceflow.Flow) -> onceflow.FlowWriter:
            return pay_flow(flow, server.url)

        flow = FlowDriver(pay_here)
        flow.send_many("payments", [("a", REQUEST), ("b", {**REQUEST, "card": "declined"}), ("a", REQUEST)])
        flow.send("payments", "a", REQUEST)
        assert flow.read("receipts") == [Record("a", {"amount": 1999, "receipt": "ch-000001"})]
        assert [each.key for each in flow.read("repeated")] == ["a", "a"]
        assert [each.key for each in flow.read("failed")] == ["b"]
        assert len(server.charges) == 1


@pytest.mark.integration
def test_without_keys_what_is_unclear_is_listed(onceflow_spark: Any) -> None:
    with PaymentServer().serving() as server:

        def pay_once_here(flow: onceflow.Flow) -> onceflow.FlowWriter:
            return pay_once_flow(flow, server.url)

        flows = FlowDriver(intend_flow, pay_once_here, watch_flow)
        flows.send_many(
            "payments", [("a", REQUEST), ("b", {**REQUEST, "account": "acc-2", "card": "lost"}), ("a", REQUEST)]
        )
        assert [(each.key, each.value["status"]) for each in flows.read("results")] == [("a", "paid"), ("b", "unclear")]
        assert [each.key for each in flows.read("unclear")] == ["b"]
        assert flows.advance(WATCH_MS / 1000) == []  # both have a result
        assert flows.table("watched") == {"a": "paid", "b": "unclear"}


# ---- the demo --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_demo(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("outbox", records=300, kills=1)
    assert result["charges"] == result["out"]
    assert result["answered_again"] > 0


@pytest.mark.long
def test_the_demo_without_idempotency_keys(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("outbox", "--without-keys", records=300, kills=1)
    assert result["unclear_not_charged"] > 0
