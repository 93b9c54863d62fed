"""The order of a start: connect, fence, read progress, commit; and what an error in between leads back to."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from onceflow.client.settings import ClientSettings
from onceflow.driver.start import source_offsets
from onceflow.driver.start import takeover as module
from onceflow.driver.start.startup import Startup
from onceflow.errors import (
    BrokerUnsupportedError,
    DeadlineExceededError,
    OnceflowError,
    OptionError,
    ProgressConflictError,
)
from onceflow.planning.read_options import ReadOptions
from onceflow.protocol.names import Names
from onceflow.protocol.progress import DriverProcess, Progress


class Cluster:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def close(self) -> None:
        self.calls.append("close")


class Session:
    """As much of a driver session as a start needs. ``problems`` says which call fails, once, and with what."""

    def __init__(self, calls: list[str], problems: dict[str, OnceflowError], progress: Progress | None) -> None:
        self.cluster = Cluster(calls)
        self.transactions = self
        self.knows_progress = False
        self._calls, self._problems, self._progress = calls, problems, progress

    def _call(self, name: str) -> None:
        self._calls.append(name)
        if name in self._problems:
            raise self._problems.pop(name)

    def check_supported(self, deadline: Any) -> None:
        self._call("connect")

    def init(self, deadline: Any) -> None:
        self.knows_progress = False
        self._call("fence")

    def progress(self, sources: Any, deadline: Any) -> Progress | None:
        self.knows_progress = True  # as in the real one: read, and maybe not decided yet
        self._call("read progress")
        return self._progress

    def give_up(self) -> None:
        self.knows_progress = False


class Start:
    """A start whose calls to Kafka are written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, progress: Progress | None = None) -> None:
        self.calls: list[str] = []
        self.problems: dict[str, OnceflowError] = {}
        self.committed: list[Progress] = []
        monkeypatch.setattr(module, "Cluster", lambda settings, refused_s: None)
        monkeypatch.setattr(module, "DriverSession", lambda *_: Session(self.calls, self.problems, progress))
        monkeypatch.setattr(module.progress_log, "ensure_topic", lambda *_: None)
        monkeypatch.setattr(module, "find_topics", self._find)
        monkeypatch.setattr(
            source_offsets.kafka_offsets, "list_offsets", lambda _, span, *__: {n: {0: 3} for n in span}
        )
        monkeypatch.setattr(module, "commit_progress", self._commit)
        monkeypatch.setattr(module, "warn_of_similar", lambda *_: None)
        monkeypatch.setattr(module, "heard_lately", lambda *_: [])
        self.startup = Startup(Names("orders"), ClientSettings("localhost:9092", {}), refused_s=15.0)
        self.takeover = self.startup.takeover

    def _find(self, cluster: Any, named: dict[str, str], deadline: Any) -> dict[str, Any]:
        return {name: source_offsets.TopicInfo(name, f"id of {name}", {0: 1}, False) for name in named}

    def _commit(self, session: Any, progress: Progress, sources: Any, deadline: Any) -> None:
        self.calls.append("commit")
        if "commit" in self.problems:
            raise self.problems.pop("commit")
        self.committed.append(progress)

    def read(self, topic: str) -> dict[int, int]:
        return self.takeover.add_source(ReadOptions(topic, "earliest", None, True, False))


def test_several_topics_are_read_after_one_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    assert start.read("in") == {0: 3}
    assert start.read("other") == {0: 3}
    assert start.calls == ["connect", "fence", "read progress"]
    start.takeover.commit()
    start.takeover.commit()
    assert start.calls == ["connect", "fence", "read progress", "commit"]
    assert [progress.offsets for progress in start.committed] == [{"in": {0: 3}, "other": {0: 3}}]
    assert start.takeover.known_progress() is start.committed[-1]


def test_progress_names_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in place of the driver before."""
    older = DriverProcess("web-1", 412, 5)
    start = Start(monkeypatch, Progress("orders", 7, {"in": {0: 3}}, {"in": "id of in"}, 0, driver=older))
    monkeypatch.setattr(module, "clock_ms", lambda: 1_700_000_000_000)
    assert start.read("in") == {0: 3}
    assert start.takeover.known_progress().driver == older, "nothing is committed yet"
    start.read("other")
    start.takeover.commit()
    ours = DriverProcess(socket.gethostname(), os.getpid(), 1_700_000_000_000)
    assert start.takeover.driver == start.committed[-1].driver == start.takeover.known_progress().driver == ours


def test_what_is_committed_already_is_not_committed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, Progress("orders", 7, {"in": {0: 3}}, {"in": "id of in"}, 0))
    assert start.read("in") == {0: 3}
    start.takeover.commit()
    assert start.calls == ["connect", "fence", "read progress"]


@pytest.mark.parametrize("step", ["fence", "read progress"])
def test_after_an_error_the_next_call_fences_again(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    start = Start(monkeypatch)
    start.problems[step] = DeadlineExceededError("no answer")
    with pytest.raises(DeadlineExceededError) as caught:
        start.read("in")
    assert (caught.value.flow, caught.value.topic) == ("orders", "in")
    assert not start.takeover.is_fenced
    with pytest.raises(OptionError, match="Nothing was read yet"):
        start.takeover.known_progress()
    start.calls.clear()
    assert start.read("in") == {0: 3}
    assert start.calls == ["fence", "read progress"]


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_was_read_before_an_error_holds_if_nobody_has_moved_the_flow(
    monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    start = Start(monkeypatch)
    start.read("in")
    start.takeover.session.give_up()  # a later read has failed
    if is_moved:
        start.takeover.session._progress = Progress("orders", 7, {"in": {0: 3}}, {"in": "id of in"}, 0)  # type: ignore[attr-defined]
        with pytest.raises(ProgressConflictError, match="Another driver has moved flow 'orders'"):
            start.read("other")
        assert start.read("in") == {0: 3}
        assert start.takeover.known_progress().batch_id == 7
    else:
        start.read("other")
        assert start.takeover.known_progress().offsets == {"in": {0: 3}, "other": {0: 3}}
    assert start.calls.count("fence") == (3 if is_moved else 2)
    start.takeover.commit()
    assert len(start.committed) == (0 if is_moved else 1)


def test_a_commit_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    start.read("in")
    start.problems["commit"] = DeadlineExceededError("no answer")
    with pytest.raises(DeadlineExceededError) as caught:
        start.takeover.commit()
    assert caught.value.flow == "orders"
    start.takeover.commit()
    assert [progress.offsets for progress in start.committed] == [{"in": {0: 3}}]


def test_a_run_without_topics_fences_again_when_progress_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Progress("orders", 7, {}, {}, 0)
    start = Start(monkeypatch, before)
    start.problems["read progress"] = DeadlineExceededError("no answer")
    with pytest.raises(DeadlineExceededError):
        start.startup.prepare_run(start.takeover.deadline())
    assert start.startup.prepare_run(start.takeover.deadline()) is before, "a run never begins with unread progress"
    assert start.calls == ["connect", "fence", "read progress", "fence", "read progress"]


def test_a_start_serves_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    start.read("in")
    assert start.takeover.is_fenced
    start.takeover.used()
    assert not start.takeover.is_fenced
    with pytest.raises(OptionError, match="Nothing was read yet"):
        start.takeover.known_progress()


def test_brokers_that_cannot_be_used_are_left_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    start.problems["connect"] = BrokerUnsupportedError("too old")
    with pytest.raises(BrokerUnsupportedError):
        start.read("in")
    assert start.calls == ["connect", "close"]
    with pytest.raises(OptionError, match="Nothing was read yet"):
        _ = start.takeover.session
    assert start.read("in") == {0: 3}
    assert start.calls[2:] == ["connect", "fence", "read progress"]
    start.takeover.close()
    assert start.calls[-1] == "close"
