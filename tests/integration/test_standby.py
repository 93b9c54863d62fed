"""A standby in the same process as the active driver: who waits, who takes over, and what people see of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

import onceflow
from onceflow.admin.status.flow_status_reader import StatusReader
from onceflow.cli.status_text import details
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.standby import standbys
from onceflow.driver.standby.heartbeats import read_tail
from onceflow.errors import FencedError, OptionError, UnknownTopicError
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration]


class Copies:
    """Copies of one flow that copies a topic."""

    def __init__(self, servers: str, spark: Any, make_topic: Callable[..., str]) -> None:
        self.servers = servers
        self.spark = spark
        self.source, self.target = make_topic("in", 1), make_topic("out", 1)
        self.sent = 0
        self._made: list[onceflow.Flow] = []

    @property
    def name(self) -> str:
        return f"flow-{self.source}"

    def fill(self, count: int) -> None:
        rows = [(b"key", str(n).encode()) for n in range(self.sent, self.sent + count)]
        independent.fill(self.servers, self.source, rows)
        self.sent += count

    def start(self, **options: Any) -> Any:
        """Start a copy, when it is its turn. Returns the query."""
        flow = onceflow.Flow(self.name, self.spark, bootstrap_servers=self.servers, **{"standby": True, **options})
        self._made.append(flow)
        return flow.write(flow.read(self.source).select("key", "value"), topic=self.target).start()

    def waiting(self) -> tuple[threading.Thread, list[Any]]:
        """A copy that starts in a thread, and its query when it has started."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.start()), daemon=True)
        thread.start()
        wait_until(lambda: self.roles().count("standby") == 1, 30, "a standby")
        return thread, found

    def roles(self) -> list[str]:
        found: list[Any] = []
        cluster = Cluster(ClientSettings(self.servers, {}))
        with contextlib.closing(cluster), contextlib.suppress(UnknownTopicError):
            found, _, _ = read_tail(cluster, self.name, Deadline(30, "test"))
        return sorted({each.driver: each.role for each, _ in found}.values())

    def status(self) -> list[str]:
        """What `onceflow status` prints. (The command itself would replace stderr, to which a standby writes.)"""
        with contextlib.closing(Cluster(ClientSettings(self.servers, {}))) as cluster:
            return details(StatusReader(cluster).read([self.name], Deadline(30, "test")))

    def check(self) -> None:
        """Every record was written once."""
        wait_until(lambda: len(self.written()) >= self.sent, 30, lambda: f"{len(self.written())} of {self.sent}")
        assert self.written() == [str(n).encode() for n in range(self.sent)]

    def written(self) -> list[bytes | None]:
        return [each.value for each in independent.read_topic(self.servers, self.target, decided=True)]

    def close(self) -> None:
        for flow in self._made:
            flow.close()


@pytest.fixture
def copies(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str]) -> Iterator[Copies]:
    made = Copies(onceflow_broker, onceflow_spark, make_topic)
    yield made
    made.close()


def test_a_standby_takes_over_when_the_active_driver_is_stopped(
    copies: Copies, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "EVERY_S", 1.2)  # a standby is heard every second
    copies.fill(10)
    first = copies.start()
    first.processAllAvailable()
    thread, found = copies.waiting()
    (active, standby) = [line for line in copies.status() if line.startswith(("active", "standby"))]
    assert f"process {os.getpid()}" in active
    assert "heard " in standby
    copies.fill(10)
    first.processAllAvailable()
    thread.join(2.0)
    wait_until(lambda: first.standbys == 1, 30, lambda: f"{first.standbys} standbys")
    assert found == [], "it waits as long as the active driver beats"
    first.stop()
    thread.join(30)
    (second,) = found
    copies.fill(10)
    second.processAllAvailable()
    copies.check()
    assert copies.roles() == ["active", "ended"]
    assert any("no standby waits" in line for line in copies.status())
    told = capfd.readouterr().err
    assert f"flow {copies.name} stands by: process" in told
    assert f"flow {copies.name} takes over: no driver is active" in told


def test_a_driver_that_was_silent_ends_when_its_standby_has_taken_over(copies: Copies) -> None:
    """It waits for records, so it would not notice for a long time that it is fenced."""
    copies.fill(5)
    first = copies.start()
    first.processAllAvailable()
    thread, found = copies.waiting()
    pulse = copies._made[0]._runs.startup.takeover.standby._held.pulse  # type: ignore[union-attr]
    with pulse._lock:  # as if the process were stopped
        thread.join(30)
    (second,) = found
    with pytest.raises(FencedError, match="has taken over while this driver was silent"):
        first.awaitTermination(30)
    copies.fill(5)
    second.processAllAvailable()
    copies.check()
    third, _ = copies.waiting()
    second.stop()
    third.join(30)


def test_a_copy_without_standby_is_warned(copies: Copies, caplog: pytest.LogCaptureFixture) -> None:
    """It fences the active driver, whose standby takes over from it again."""
    copies.start()
    copies.start(standby=False)
    assert f"flow {copies.name}: process {os.getpid()} on" in caplog.text
    assert "this driver is without it" in caplog.text


def test_a_standby_whose_source_is_missing_does_not_wait(copies: Copies) -> None:
    first = copies.start()
    other = onceflow.Flow(copies.name, copies.spark, bootstrap_servers=copies.servers, standby=True)
    with pytest.raises(UnknownTopicError, match="'misspelt' does not exist"):
        other.read("misspelt")
    assert copies.roles() == ["active"]
    copies.fill(5)
    first.processAllAvailable()
    copies.check()


def test_a_query_that_fails_hands_over_although_its_process_lives(copies: Copies) -> None:
    first = copies.start()
    thread, found = copies.waiting()
    first._engine._loop._fetch_problem = RuntimeError("a mistake of this process")
    copies.fill(5)
    thread.join(30)
    assert found, "nobody has waited for the first query, or stopped it"
    found[0].processAllAvailable()
    copies.check()
    with pytest.raises(Exception, match="a mistake of this process"):
        first.awaitTermination(30)


def test_a_standby_rehearses_its_start(copies: Copies, caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong in a rehearsal is only logged, so a change of the planner could make it useless unseen."""
    first = copies.start()
    with caplog.at_level(logging.DEBUG, "onceflow"):
        thread, found = copies.waiting()
        wait_until(lambda: any(line.startswith("standby: ") for line in copies.status()), 60, "a warm standby")
    assert "could not be rehearsed" not in caplog.text
    assert f"flow {copies.name} stands by: process" in caplog.text
    topics = AdminClient({"bootstrap.servers": copies.servers}).list_topics(timeout=30).topics
    assert not [topic for topic in topics if topic.startswith("rehearsal")]
    first.stop()
    thread.join(30)
    copies.fill(5)
    found[0].processAllAvailable()
    copies.check()


def test_without_standby_nothing_is_written_and_nobody_is_waited_for(copies: Copies) -> None:
    first = copies.start(standby=False)
    second = copies.start(standby=False)
    assert not any("heartbeats" in each.name or "door" in each.name for each in threading.enumerate())
    copies.fill(5)
    second.processAllAvailable()
    with pytest.raises(FencedError):
        first.awaitTermination(30)
    copies.check()
    assert copies.roles() == []


def test_a_wait_can_be_ended(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    from onceflow.driver.standby.wait import Wait

    copies.start()
    looks = iter([False, False])

    def step(self: Wait) -> bool:
        for each in looks:
            return each
        raise KeyboardInterrupt

    monkeypatch.setattr(Wait, "step", step)
    with pytest.raises(KeyboardInterrupt):
        copies.start()
    assert copies.roles() == ["active", "ended"]
    wait_until(lambda: sum("door" in each.name for each in threading.enumerate()) == 1, 5, "one door")


def test_an_address_that_this_machine_has_not_is_refused(copies: Copies) -> None:
    with pytest.raises(OptionError, match=r"cannot listen on standby_host='192\.0\.2\.1'"):
        copies.start(standby_host="192.0.2.1")
