"""`onceflow demo` as people run it: every flow killed, everything accounted for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from onceflow.client.deadline import Deadline
from onceflow.testing.waiting import wait_until
from onceflow_workshop.demos.reading import Tally
from onceflow_workshop.demos.tables_audit import Auditor
from onceflow_workshop.demos.tables_check import Answer, Change

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.long
def test_guarantees_differ_as_promised(onceflow_broker: str) -> None:
    """The same kills at all three: at_most_once has lost, at_least_once has doubled, exactly_once neither."""
    command = [sys.executable, "-m", "onceflow.cli.main", "demo", "guarantees", "--records", "3000"]
    command += ["--bootstrap-servers", onceflow_broker]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads(answer.stdout.splitlines()[-1])
    assert (result["demo"], result["in"], result["verdict"]) == ("guarantees", 3000, "passed")
    found = result["guarantees"]
    assert list(found) == ["at_most_once", "at_least_once", "exactly_once"]
    # What one kill costs is the batch that it has hit: at most 200 of the 3,000 records, and hardly fewer.
    assert 150 < found["at_most_once"]["lost"] <= 204
    assert found["at_most_once"]["duplicated"] == 0
    assert 150 < found["at_least_once"]["duplicated"] <= 204
    assert found["at_least_once"]["lost"] == 0
    assert (found["exactly_once"]["lost"], found["exactly_once"]["duplicated"]) == (0, 0)
    for counts in found.values():
        assert counts["out"] == 3000 - counts["lost"] + counts["duplicated"]
        assert counts["kills"] == 2
        assert counts["rows_per_s"] > 0
    for name in found:
        for step in ("write", "progress"):
            assert re.search(rf"copy-{name}-\w+: SIGKILL after step {step} \(in batch \d+\)", answer.stderr)


def test_a_tally_counts_what_is_committed(onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    topic, other = make_topic("tally", 2), make_topic("tally", 1)
    tally = Tally(onceflow_broker, {topic: 2, other: 1})
    producer = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": topic})
    producer.init_transactions(30)
    deadline = Deadline(30, "the tally")

    def wait_for(count: int) -> None:
        wait_until(
            lambda: dict(tally.look(deadline)) == {topic: count, other: 0}, 30, lambda: f"{count}: {tally.counts}"
        )

    def write(count: int, *, commit: bool) -> None:
        producer.begin_transaction()
        for number in range(count):
            producer.produce(topic, b"v", str(number))
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    try:
        write(5, commit=True)
        write(3, commit=False)
        wait_for(5)
        quiet = tally.quiet_s
        tally.look(deadline)
        assert tally.quiet_s > quiet
        write(7, commit=True)
        wait_for(12)
    finally:
        tally.close()


def test_the_auditor_of_tables_finds_wrong_answers(onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    """Of an aborted transaction, of another position, stale; answers are compared when the topic is read so far."""
    topic = make_topic("audited", 2, cleanup_policy="compact")
    producer = Producer({"bootstrap.servers": onceflow_broker, "transactional.id": topic})
    producer.init_transactions(30)

    def write(value: str | None, *, commit: bool = True) -> None:
        producer.begin_transaction()
        producer.produce(topic, value, "ada", 1)
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    auditor = Auditor(onceflow_broker, topic, 2)
    changes = auditor.stream()
    auditor.start()
    try:
        write("1")  # offset 0, and a control record
        write("2", commit=False)
        write("3")  # offset 4
        write(None)

        def ask(value: int | None, position: int, least: int = 0) -> None:
            auditor.answers.append(Answer("key", "here", 0.0, {1: position}, {1: least}, {"ada": value}))

        for right in ((1, 2), (3, 5), (None, 7), (None, 8), (3, 2)):  # the last one is newer than its position
            ask(*right)
        changes += [{1: 2}, Change(1, 4, "ada", 3), Change(1, 6, "ada", None)]
        wait_until(auditor.check, 30, lambda: f"{auditor.checked} {auditor.fold.ends} {auditor.behind}")
        checked = auditor.checked["key"]
        assert (checked.answers, checked.wrong, checked.newer) == (5, 0, 1), checked.examples
        assert auditor.checked["changes"].wrong == 0
        for wrong in ((2, 2), (2, 5), (1, 5), (3, 7), (None, 99), (1, 2, 3)):
            ask(*wrong)
        wait_until(lambda: auditor.check() and checked.answers == 11, 30, lambda: str(checked))
        assert (checked.wrong, checked.stale) == (6, 1), checked.examples
        write("4")
        wait_until(lambda: auditor.behind == 1, 30, lambda: str(auditor.behind))
        assert not auditor.check()  # the stream lacks it
    finally:
        auditor.stop()
        auditor.join(10)
