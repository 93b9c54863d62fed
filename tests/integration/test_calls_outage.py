"""A service that is down for a while: calls fail, a circuit breaker opens, and `Retry` brings all records back."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow import Record, serdes
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

FAILURES, RECORDS, MORE, KEYS = 6, 60, 20, 12


class Shop(ThreadingHTTPServer):
    """A service that books an amount once for each idempotency key, unless it is down."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Booking)
        self.lock = threading.Lock()
        self.down = True
        self.refused: list[str] = []
        self.booked: Counter[str] = Counter()


class Booking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        shop: Any = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        with shop.lock:
            down = shop.down
            if down:
                shop.refused.append(key)
            else:
                shop.booked[key] += 1
        self.send_response(503 if down else 200)
        self.end_headers()
        self.wfile.write(f"receipt of {key}".encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def book(port: int, amount: int, idempotency_key: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/", str(amount), {"Idempotency-Key": idempotency_key})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"the shop answers {answer.status}")
    return text


class Book(onceflow.Processor):
    value = state = output = serdes.JSON

    def __init__(self, port: int) -> None:
        breaker = onceflow.Breaker(failures=FAILURES, pause="400 ms")
        self.book = onceflow.concurrently(partial(book, port), limit=4, retries=0, breaker=breaker)

    def process(self, key: bytes, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            state.put(state.get(0) + record.value)
            receipt = self.book(record.value, onceflow.idempotency_key(record))
            yield Record(key, {"amount": record.value, "receipt": receipt})


@pytest.fixture
def shop() -> Iterator[Shop]:
    server = Shop()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def orders(first: int, count: int) -> list[tuple[bytes, bytes]]:
    return [(b"customer-%d" % (n % KEYS), b"%d" % n) for n in range(first, first + count)]


@pytest.mark.long
def test_a_service_that_is_down_for_a_while(
    onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path, shop: Shop
) -> None:
    source, failed, again, target = (make_topic(name, 2) for name in ("orders", "failed", "retry", "booked"))
    parked = make_topic("parked", 1)
    independent.fill(onceflow_broker, source, orders(0, RECORDS))

    def seen(topic: str) -> list[independent.Seen]:
        return independent.read_topic(onceflow_broker, topic, decided=True)

    def flow(name: str) -> onceflow.Flow:
        return onceflow.Flow(f"{name}-{source}", onceflow_spark, bootstrap_servers=onceflow_broker)

    with flow("book") as booking, flow("retry") as retrying:
        new, old = (booking.read(topic, include_headers=True) for topic in (source, again))
        rows = booking.process(
            new.unionByName(old), Book(shop.server_address[1]), table=f"{source}-sums", on_error="dead-letter",
            dead_letter_topic=failed, state_dir=tmp_path,
        )  # fmt: skip
        policy = onceflow.Retry(
            retry_topic=again, parked_topic=parked, base="200 ms", ceiling="1 second", max_attempts=1000
        )
        letters = onceflow.Retry.by_origin(retrying.read(failed, include_headers=True))
        waiting = retrying.process(letters, policy, table=f"{source}-waiting", state_dir=tmp_path)
        queries = [
            booking.write(rows, topic=target, trigger="100 milliseconds").start(),
            retrying.write(waiting, trigger="100 milliseconds").start(),
        ]

        def all_booked(count: int) -> bool:
            return len(seen(target)) >= count

        def useless() -> Any:
            return next((query.failure for query in queries if query.failure is not None), None)

        wait_until(lambda: len(seen(again)) > RECORDS, 60, "records come back and fail again", useless=useless)
        assert not seen(target)
        shop.down = False
        wait_until(lambda: all_booked(RECORDS), 60, lambda: f"not only {len(seen(target))}", useless=useless)
        tried = Counter(dict(letter.headers)["onceflow.error.class"] for letter in seen(failed))
        failures = sum(tried.values())
        independent.fill(onceflow_broker, source, orders(RECORDS, MORE))
        wait_until(lambda: all_booked(RECORDS + MORE), 60, "the breaker is closed", useless=useless)
        for query in queries:
            query.stop()
        assert sum(batch.dead_letters for batch in queries[0].batches) == failures == len(seen(failed))

    # While it was open, hardly any call was made; a trial after each pause.
    assert tried.keys() == {b"ConnectionError", b"CircuitOpenError"}
    assert FAILURES <= tried[b"ConnectionError"] <= len(shop.refused) < tried[b"CircuitOpenError"]
    # Each order has one result, and one effect, under one key in all of its attempts.
    results = [json.loads(record.value or b"") for record in seen(target)]
    assert Counter(each["amount"] for each in results) == Counter(range(RECORDS + MORE))
    assert shop.booked.keys() == {each["receipt"].removeprefix("receipt of ") for each in results}
    assert len(shop.booked) == RECORDS + MORE
    assert set(shop.refused) <= shop.booked.keys()
    assert all(key.startswith(f"{source}/") for key in shop.booked)
    assert not seen(parked)
    sums: dict[bytes | None, int] = {record.key: int(record.value or b"0") for record in seen(f"{source}-sums")}
    assert sums == {b"customer-%d" % k: sum(range(k, RECORDS + MORE, KEYS)) for k in range(KEYS)}
    assert not any({record.key: record.value for record in seen(f"{source}-waiting")}.values()), "nothing waits"
