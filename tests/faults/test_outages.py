"""Outages of the brokers, of a second to a minute: a flow is back soon after them."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from onceflow.broker.local import LocalBroker
from onceflow.testing.broker import BACK_SOON, create_topic

pytestmark = [pytest.mark.integration, pytest.mark.faults]

SEED = 1128
#: How long after brokers answer the first output may come. It takes a second or two; with a back-off of its own that
#: doubled up to 30 seconds, it took as long as the outage. So only long outages show the difference.
BACK_S = 8.0
KNOCKS_A_SECOND = 20  # of all connections of a flow together


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path_factory.mktemp("away"), properties=BACK_SOON) as broker:
        yield broker


def outage(broker: LocalBroker, kind: str, seconds: float) -> None:
    """The broker is away for so long. In the end it answers."""
    end = time.monotonic() + seconds
    if kind == "killed":
        broker.kill()
    else:
        broker.pause(1)
    time.sleep(max(0.0, end - time.monotonic()))
    if kind == "killed":
        broker.start()
    else:
        broker.resume(1)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_a_flow_is_back_soon(own_broker: LocalBroker, make_pipe: Callable[..., Any], engine: str) -> None:
    pipe = replace(make_pipe(), bootstrap=own_broker.bootstrap_servers)
    for topic in (pipe.source, pipe.target):
        create_topic(pipe.bootstrap, topic, 2)
    chance = random.Random(SEED)
    lengths = [math.exp(chance.uniform(0, math.log(60))) for _ in range(20 if engine == "driver" else 5)]
    pipe.fill(100)
    flow = pipe.open()
    df = flow.read(pipe.source).select("key", "value")
    query = flow.write(df, topic=pipe.target, engine=engine, trigger="100 milliseconds").start()
    late = []
    try:
        query.processAllAvailable()
        for length in lengths:
            kind = chance.choice(["killed", "frozen"])
            if chance.random() < 0.5:
                pipe.fill(200)  # so that it ends in the middle of a batch
            outage(own_broker, kind, length)
            back = time.monotonic()
            pipe.fill(10)
            filled = time.monotonic()
            query.processAllAvailable()
            late.append((round(time.monotonic() - back, 1), round(filled - back, 1), kind, round(length)))
    finally:
        query.stop()
    pipe.check()
    print(late)
    assert max(seconds for seconds, *_ in late) < BACK_S, late


class Counting:
    """Listens where the broker was, and hangs up on everybody.

    Attributes:
        at: when somebody has tried, in monotonic seconds.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_server((host, int(port)))
        self.at: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Counting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.5)
                if b"rdkafka" not in connection.recv(1_000):  # the client of the test fills its sources
                    self.at.append(time.monotonic())


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", "tasks"])
def test_a_broker_that_stays_away_is_not_hammered(
    own_broker: LocalBroker, make_pipe: Callable[..., Any], engine: str
) -> None:
    """A minute: the flow knocks a few times a second, not more often the longer it lasts, and is back soon."""
    pipe = replace(make_pipe(), bootstrap=own_broker.bootstrap_servers)
    for topic in (pipe.source, pipe.target):
        create_topic(pipe.bootstrap, topic, 2)
    pipe.fill(100)
    flow = pipe.open()
    df = flow.read(pipe.source).select("key", "value")
    query = flow.write(df, topic=pipe.target, engine=engine, trigger="100 milliseconds").start()
    try:
        query.processAllAvailable()
        own_broker.kill()
        with Counting(own_broker.bootstrap_servers) as counting:
            began = time.monotonic()
            time.sleep(60)
        own_broker.start()
        back = time.monotonic()
        pipe.fill(10)
        query.processAllAvailable()
        late_s = time.monotonic() - back
    finally:
        query.stop()
    pipe.check()
    halves = [sum(low <= at - began < low + 30 for at in counting.at) for low in (0, 30)]
    print(f"knocked {halves} times in the halves of a minute; the first output came after {late_s:.1f} s")
    assert halves[1] <= 30 * KNOCKS_A_SECOND, halves
    assert late_s < BACK_S
