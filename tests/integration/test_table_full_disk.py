"""Tables and the query server on a disk that is full, or nearly, on a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from onceflow import EnvironmentUnusableError, Table
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

MANY = [(b"many-%06d" % n, b"x" * 50) for n in range(20_000)]


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("full", 1, cleanup_policy="compact")


@pytest.mark.long
@pytest.mark.parametrize("left", [0, 60 << 10])
def test_a_server_says_that_its_disk_is_full(
    onceflow_broker: str, topic: str, small_disk: Any, serve: Callable[..., httpx.Client], left: int
) -> None:
    """What is there is answered, and nobody is told that it is all."""
    independent.fill(onceflow_broker, topic, [(b"k", b"1"), (b"l", b"2")])
    client = serve(topic, state_dir=small_disk.folder)
    path = f"/tables/{topic}/keys/"
    before = client.get(f"{path}k").headers["Onceflow-Position"]
    small_disk.fill(left)
    independent.fill(onceflow_broker, topic, MANY)
    wait_until(lambda: client.get("/ready").status_code == 503, 30, "the disk is full")
    until = time.monotonic() + 4  # several attempts
    while time.monotonic() < until:
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert "The disk of the local state is full" in ready.text
        found = client.get(f"{path}k")
        assert (found.status_code, found.json()["value"]) == (200, 1)
        assert found.json()["lag"]["records"] > 0
        assert found.headers["Onceflow-Position"] == before
        time.sleep(0.05)
    small_disk.mend()
    wait_until(lambda: client.get("/ready").status_code == 200, 30, "there is room again")
    params = {"max_staleness": "5s", "wait": "30s"}
    assert client.get(f"/tables/{topic}/count", params=params).json()["count"] == len(MANY) + 2


@pytest.mark.parametrize("left", [60 << 10, 200 << 10])
def test_a_table_that_does_not_fit_the_disk(
    onceflow_broker: str, topic: str, small_disk: Any, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    independent.fill(onceflow_broker, topic, MANY)
    small_disk.fill(left)
    given: Any = {"bootstrap_servers": onceflow_broker, "state_dir": small_disk.folder}
    with pytest.raises(EnvironmentUnusableError, match="The disk of the local state is full"):
        Table(topic, **given).start()
    assert len(caplog.messages) <= 1
    small_disk.mend()
    with Table(topic, **given) as table:
        assert table.count() == len(MANY)
