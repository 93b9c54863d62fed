"""What is started while `onceflow promote` is killed or slow. No Spark: a start reads progress before it needs one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import onceflow
from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import create_own_topic
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.record import progress_log
from onceflow.driver.record.progress_log import partition_of
from onceflow.driver.record.session import DriverSession
from onceflow.driver.start.startup import Startup
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, ForkOrigin, Progress, TableProgress, decode
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
try:
    from moving_flows import Call, refused, told
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

STEPS = ("init", "write", "progress", "end")


def seconds() -> Deadline:
    return Deadline(30, "a test")


def holds(condition: Callable[[], bool], for_s: float = 1.0) -> None:
    """It holds all the time. A start that waits for nothing takes a few milliseconds."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        assert condition()
        time.sleep(0.02)


@dataclass
class Pair:
    """A flow and a copy of it, which have committed progress and do not run."""

    bootstrap: str
    old: str
    copy: str
    source: str

    def command(self) -> list[str]:
        line = ["promote", self.copy, "--replaces", self.old, "--yes", "--json", "--wait", "0"]
        return [*line, "--bootstrap-servers", self.bootstrap]

    def promote(self, *rules: dict[str, Any]) -> subprocess.Popen[str]:
        """The command, as a process with these faults."""
        environment = {**os.environ, **({hooks.VARIABLE: faults.value_of(*rules)} if rules else {})}
        return subprocess.Popen(
            [sys.executable, "-m", "onceflow.cli.main", *self.command()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_at(self, step: str) -> None:
        """The command is killed after this step."""
        with self.promote({"step": step, "action": "kill", "flow": self.old}) as killed:
            output = killed.communicate(timeout=60)[0]
        assert killed.returncode == -9, output

    def progress(self, flow: str) -> Progress | None:
        """As an independent consumer sees it. What is open is not waited for."""
        seen = independent.read_topic(self.bootstrap, PROGRESS_TOPIC)
        last = [each.value for each in seen if each.key == flow.encode()]
        return decode(flow.encode(), last[-1]) if last and last[-1] is not None else None

    @contextlib.contextmanager
    def starting(self, flow: str) -> Iterator[list[Progress | None]]:
        """A start of a flow in a thread. It has ended at the end of the block."""
        found: list[Progress | None] = []
        start = threading.Thread(target=lambda: found.append(self.found(flow)))
        start.start()
        yield found
        start.join(40)
        assert not start.is_alive()

    @contextlib.contextmanager
    def started(self, flow: str) -> Iterator[Startup]:
        """A start of a flow, up to its progress."""
        startup = Startup(Names(flow), ClientSettings(self.bootstrap), refused_s=15)
        try:
            startup.takeover.connect(seconds())
            startup.takeover.fence({}, seconds())
            yield startup
        finally:
            startup.takeover.close()

    def found(self, flow: str) -> Progress | None:
        """The progress that a start of a flow finds."""
        with self.started(flow) as startup:
            return startup.takeover.found


@pytest.fixture
def make_pair(onceflow_broker: str, make_topic: Any) -> Callable[..., Pair]:
    def make(*, state: bool, together: bool) -> Pair:
        """Args: state: whether they have tables. together: whether one partition has the progress of both."""
        source = make_topic("source", 1)
        old = f"{source}-old"
        names = (f"{old}-{n}" for n in itertools.count())
        copy = next(name for name in names if (partition_of(name) == partition_of(old)) is together)
        pair = Pair(onceflow_broker, old, copy, source)
        with contextlib.closing(Cluster(ClientSettings(onceflow_broker))) as cluster:
            progress_log.ensure_topic(cluster, seconds())
            ids = {source: cluster.topic(source, seconds()).topic_id}
            tables = {old: f"{old}-t", copy: f"{copy}-t"} if state else {}
            for name in tables.values():
                for topic in (name, f"{name}-internal"):
                    info = create_own_topic(
                        cluster, topic, "table", partitions=1, configs={"cleanup.policy": "compact"}, deadline=seconds()
                    )
                    ids[topic] = info.topic_id
            for flow, offset in ((old, 5), (copy, 3)):
                progress = Progress(flow, 4, {source: {0: offset}}, ids, 1_700_000_000_000)
                if state:
                    topics = (tables[flow], f"{tables[flow]}-internal")
                    progress = replace(
                        progress,
                        changelogs={topic: {0: 0} for topic in topics},
                        tables={tables[flow]: TableProgress(processing_timers=False)},
                    )
                if flow == copy:
                    made = {tables[old]: tables[copy]} if state else {}
                    progress = replace(progress, forked=ForkOrigin(old, 2, 1_700_000_000_000, {}, made))
                session = DriverSession(cluster, Names(flow))
                session.init(seconds())
                session.progress({}, seconds())
                commit_progress(session, progress, [], seconds())
        return pair

    return make


def pairs_of(first: list[tuple[bool, bool]]) -> Any:
    """Parametrizes ``state`` and ``together``: these pairs, and the others in long runs."""
    marks = {each: () if each in first else pytest.mark.long for each in itertools.product((False, True), repeat=2)}
    names = {
        each: f"{'stateful' if each[0] else 'stateless'}, {'one' if each[1] else 'two'} partitions" for each in marks
    }
    return pytest.mark.parametrize(
        "state, together", [pytest.param(*each, marks=marks[each], id=names[each]) for each in marks]
    )


@pairs_of([(True, True)])
def test_killed_and_the_copy_is_started_again(
    make_pair: Callable[..., Pair], call: Call, state: bool, together: bool
) -> None:
    """Before `end`, its start finds its own progress, and waits for that as long as the transaction is open. After it,
    its start is refused."""
    pair = make_pair(state=state, together=together)
    before = {flow: pair.progress(flow) for flow in (pair.old, pair.copy)}
    for step in STEPS:
        pair.kill_at(step)
        if step == "end":
            break
        with pair.starting(pair.copy) as found:
            if step != "init":  # its record is written: nobody may take it for committed
                holds(lambda: not found)
                assert pair.found(pair.old) == before[pair.old]  # aborts it
        assert found == [before[pair.copy]], step
        assert pair.progress(pair.old) == before[pair.old]
    with pytest.raises(onceflow.ProgressConflictError, match="has taken the place of") as over:
        pair.found(pair.copy)
    assert pair.old in over.value.next_step
    after = pair.found(pair.old)
    assert after is not None
    assert after.promoted is not None
    assert after.promoted.flow == pair.copy
    assert told(call(*pair.command()[:-2]))["already"]


@pytest.mark.long
@pairs_of([(True, False)])
def test_slow_and_the_copy_is_started_again(
    make_pair: Callable[..., Pair], tmp_path: Path, state: bool, together: bool
) -> None:
    """The copy waits; the command finds that it was started, and gives up; the copy goes on. Nothing has changed."""
    pair = make_pair(state=state, together=together)
    before = {flow: pair.progress(flow) for flow in (pair.old, pair.copy)}
    go, at = tmp_path / "go", tmp_path / "at"
    rule = {"step": "progress", "action": "pause", "flow": pair.old, "until": str(go), "once_file": str(at)}
    with pair.promote(rule) as slow:
        wait_until(at.exists, 60, "the step", useless=slow.poll)
        with pair.starting(pair.copy) as found:
            holds(lambda: not found)
            go.touch()
            output = slow.communicate(timeout=60)[0]
    assert slow.returncode == 1, output
    assert "was started again meanwhile" in output
    assert found == [before[pair.copy]]
    assert {flow: pair.progress(flow) for flow in before} == before


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
def test_killed_and_run_again_at_once(make_pair: Callable[..., Pair], call: Call, together: bool) -> None:
    """At `write`, only the last record of the copy is there, which may be in another partition than the flow's."""
    pair = make_pair(state=False, together=together)
    for step in ("write", "progress"):
        pair.kill_at(step)
    done = told(call(*pair.command()[:-2]))
    assert not done["already"]
    assert (pair.progress(pair.copy) or Progress("", 0, {}, {}, 0)).became == pair.old


@pytest.mark.long
def test_killed_and_nothing_else_is_started(make_pair: Callable[..., Pair]) -> None:
    """The transaction's timeout ends it, so that the copy is back without a hand, within one start."""
    pair = make_pair(state=False, together=True)
    before = pair.progress(pair.copy)
    pair.kill_at("progress")
    startup = Startup(Names(pair.copy), ClientSettings(pair.bootstrap), refused_s=15)
    startup.takeover.connect(startup.takeover.deadline())
    assert startup.takeover.fence({}, startup.takeover.deadline()) == before
    startup.takeover.close()


@pytest.mark.long
def test_a_flow_that_has_become_another_one(make_pair: Callable[..., Pair], call: Call) -> None:
    """Its name is not in use: nothing is done to it but `onceflow reset`, and `onceflow fork` to it."""
    pair = make_pair(state=False, together=True)
    told(call(*pair.command()[:-2]))
    taken = "has taken the place of"
    for words in (
        ("reset", pair.copy, "--to", "earliest", "--yes"),
        ("progress", "export", pair.copy),
        ("fork", pair.copy, f"{pair.copy}-again", "--yes"),
        ("compare", pair.old, pair.copy),
        ("verify", pair.copy),
        ("promote", pair.old, "--replaces", pair.copy, "--yes"),
    ):
        refused(call(*words), onceflow.ProgressConflictError, taken)
    listed = [json.loads(line)["flow"] for line in call("status", "--json").stdout.splitlines()]
    assert pair.old in listed
    assert pair.copy not in listed
    assert taken in call("status", pair.copy).stdout
    told(call("reset", pair.copy, "--yes", "--json"))
    assert pair.found(pair.copy) is None
    again = told(call("fork", pair.old, pair.copy, "--yes", "--json"))
    assert not again["already"]
    told(call(*pair.command()[:-2]))
    assert not told(call("fork", pair.old, pair.copy, "--yes", "--json"))["already"]


def test_open_transactions_of_other_flows_are_not_waited_for(make_pair: Callable[..., Pair], call: Call) -> None:
    """They hold the last stable offset of the progress topic back, for 15 minutes if a command was killed."""
    pair = make_pair(state=False, together=True)
    other = Producer({"bootstrap.servers": pair.bootstrap, "transactional.id": f"other-{pair.source}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(PROGRESS_TOPIC, b"{}", b"other", partition=partition_of(pair.old))
    other.flush(30)
    began = time.monotonic()
    third = f"{pair.old}-third"
    told(call("fork", pair.old, third, "--yes", "--json"))
    assert pair.found(third) is not None
    assert not told(call(*pair.command()[:-2]))["already"]
    assert time.monotonic() - began < 30, "less than the timeout of a transaction"
    other.abort_transaction(30)
