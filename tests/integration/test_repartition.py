"""``onceflow table repartition`` on a real broker: every row is in its new partition, once, or nothing has happened."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

import onceflow
from onceflow import hooks
from onceflow.admin.change import flow_transaction, repartition
from onceflow.admin.change.row_moves import Repartitioner
from onceflow.admin.records.writer import Row, Writer
from onceflow.cli.main import cli, main
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import TopicLimits
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Transactions
from onceflow.driver.record import progress_log
from onceflow.driver.step import joins
from onceflow.protocol.names import Names
from onceflow.protocol.progress import DriverProcess, Progress, TableProgress
from onceflow.server.formats import Format
from onceflow.state.changelog import topics
from onceflow.state.format import rows
from onceflow.state.local.format import CommitId, Goal, partition_folder
from onceflow.state.local.opening import Opened, open_partition
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.testing import faults, independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
TIME_MS = 1_700_000_000_000
Headers = list[tuple[str, bytes | None]]


@dataclass
class State:
    """A flow's table without the flow: rows as a flow commits them, with progress, and what must be found.

    Args:
        expected: by topic and key: value, headers, timestamp.
    """

    bootstrap: str
    flow: str
    source: str
    table: str
    tmp_path: Path
    place: Callable[[list[bytes], int], dict[bytes, int]]
    progress: Progress
    expected: dict[tuple[str, bytes], tuple[bytes, Headers, int]] = field(default_factory=dict)

    @property
    def internal(self) -> str:
        return f"{self.table}-internal"

    @property
    def before(self) -> int:
        return len(self.progress.changelogs[self.table])

    def user(self, topic: str, key: bytes) -> bytes:
        return key if topic == self.table else rows.split(key[1:])[0]

    def places(self, partitions: int) -> dict[bytes, int]:
        """Where the keys of all expected rows belong."""
        return self.place([self.user(topic, key) for topic, key in self.expected], partitions)

    # ---- what a flow does ----------------------------------------------------------------------------

    def commit(self, changes: list[tuple[str, bytes, bytes, bytes | None, Headers]], *, batch: int) -> None:
        """One batch: (topic, user's key, record's key, value, headers)."""
        places = self.place([user for _, user, _, _, _ in changes], self.before)
        by_place: dict[tuple[str, int], list[tuple[bytes, Row]]] = {}
        for n, (topic, user, key, value, headers) in enumerate(changes):
            stamp = TIME_MS + 1000 * batch + n
            by_place.setdefault((topic, places[user]), []).append((key, Row(value, stamp, headers or None)))
            if value is None:
                self.expected.pop((topic, key), None)
            else:
                self.expected[topic, key] = (value, headers, stamp)
        self.write(by_place, batch=batch)

    def write(self, by_place: Mapping[tuple[str, int], list[tuple[bytes, Row]]], *, batch: int) -> None:
        with connected(self.bootstrap) as (cluster, deadline):
            transactions = Transactions(cluster, f"onceflow.{self.flow}")
            transactions.init(deadline)
            identity = transactions.begin(deadline)
            limits = dict.fromkeys((self.table, self.internal), TopicLimits(1_000_000))
            writer = Writer(cluster, transactions, limits, deadline)
            for (topic, partition), found in by_place.items():
                writer.write(topic, partition, found)
            ends = {name: dict(old) for name, old in self.progress.changelogs.items()}
            for (topic, partition), written in writer.finish().items():
                ends[topic][partition] = written.end_offset
            who = {"producer_id": identity.producer_id, "producer_epoch": identity.producer_epoch}
            self.progress = replace(self.progress, batch_id=batch, changelogs=ends, **who)
            offsets = self.progress.offsets
            progress_log.write_progress(cluster, transactions, Names(self.flow), self.progress, offsets, deadline)
            transactions.commit(deadline, flow=self.flow, doing="tested")

    def fill(self, keys: int) -> None:
        """Some batches: values, flags, maps, timers, and deletes of all of them."""
        for batch in (1, 2):
            changes: list[tuple[str, bytes, bytes, bytes | None, Headers]] = []
            for n in range(keys):
                user = b"key\0%d" % n
                headers: Headers = [("onceflow.expires", b"99999999999999"), ("other", None)] if n % 3 == 0 else []
                entry, timer = rows.map_key(user, b"map", b"%d" % (n % 5)), rows.timer_key(user, b"timer")
                gone = batch == 2 and n % 7 == 0
                changes.append((self.table, user, user, None if gone else b"%d in %d" % (n, batch), headers))
                changes.append((self.internal, user, entry, None if gone else rows.pack(b"e%d" % batch), []))
                due = rows.pack(rows.timer_payload(b"e", TIME_MS + n))
                changes.append((self.internal, user, timer, None if gone else due, []))
            # Half of the keys, and those that are deleted, are written again.
            some = [change for change in changes if batch == 1 or change[1][-1] % 2 == 0 or change[3] is None]
            self.commit(some, batch=batch)

    # ---- the command ---------------------------------------------------------------------------------

    def arguments(self, partitions: int, *more: str) -> list[str]:
        where = ["--bootstrap-servers", self.bootstrap, "--partitions", str(partitions), "--yes"]
        return ["table", "repartition", self.flow, self.table, *where, *more]

    def run(self, partitions: int, *more: str) -> dict[str, Any]:
        result = CliRunner().invoke(cli, self.arguments(partitions, "--json", *more), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def alter(self, topic: str, partitions: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(30)

    # ---- what must be --------------------------------------------------------------------------------

    def committed(self) -> Progress:
        with connected(self.bootstrap) as (cluster, deadline):
            found = progress_log.read_progress(cluster, self.flow, self.flow, {self.source: [0, 1]}, deadline)
        assert found is not None
        return found

    def check(self, partitions: int) -> None:
        """Independent consumers find every row, once, where librdkafka's murmur2 puts its key; progress agrees."""
        for topic in (self.table, self.internal):
            last: dict[tuple[int, bytes], independent.Seen] = {}
            ends = dict.fromkeys(range(partitions), 0)
            for seen in independent.read_topic(self.bootstrap, topic, decided=True):
                assert seen.key is not None
                last[seen.partition, seen.key] = seen
                ends[seen.partition] = seen.offset + 1
            live = {place: seen for place, seen in last.items() if seen.value is not None}
            found = {
                (topic, key): (seen.value, list(seen.headers), seen.timestamp_ms) for (_, key), seen in live.items()
            }
            assert len(found) == len(live), "a key is in two partitions"
            assert found == {place: row for place, row in self.expected.items() if place[0] == topic}
            places = self.places(partitions)
            assert all(partition == places[self.user(topic, key)] for partition, key in live)
            assert dict(self.committed().changelogs[topic]) == ends
        assert independent.committed_offsets(self.bootstrap, self.flow) == {(self.source, p): 5 + p for p in range(2)}

    def stores(self) -> tuple[dict[bytes, bytes], list[str]]:
        """All rows of local stores that are brought up to progress as a flow does, and how they came there."""
        now = self.committed()
        last = CommitId(now.batch_id, now.producer_id, now.producer_epoch)
        found: dict[bytes, bytes] = {}
        how = []
        with connected(self.bootstrap) as (cluster, _):
            for partition, table_end in sorted(now.changelogs[self.table].items()):
                ids = now.topic_ids[self.table], now.topic_ids[self.internal]
                ends = table_end, now.changelogs[self.internal][partition]
                goal = Goal(self.flow, self.table, partition, *ids, *ends, last)
                opened: Opened = open_partition(
                    partition_folder(self.tmp_path, self.flow, self.table, partition),
                    LmdbStore,
                    goal,
                    CommittedReader(cluster),
                    verify=True,
                    now_ms=TIME_MS,
                )
                mine = dict(opened.store.scan(b""))
                assert not set(mine) & set(found)
                found |= mine
                how.append(opened.how)
                opened.store.close()
        return found, how

    def check_stores(self) -> list[str]:
        found, how = self.stores()
        values = {key[1:]: rows.unpack(row).payload for key, row in found.items() if key[:1] == rows.VALUE}
        assert values == {key: value for (topic, key), (value, _, _) in self.expected.items() if topic == self.table}
        others = {key: row for key, row in found.items() if key[:1] in (rows.MAP, rows.TIMER)}
        assert others == {key: value for (topic, key), (value, _, _) in self.expected.items() if topic == self.internal}
        due = [key for key in found if key[:1] == rows.TIMER_INDEX]
        assert len(due) == sum(key[:1] == rows.TIMER for key in others)
        return how


class connected:
    """A connection and a deadline."""

    def __init__(self, bootstrap: str) -> None:
        self.cluster = Cluster(ClientSettings(bootstrap))

    def __enter__(self) -> tuple[Cluster, Deadline]:
        deadline = Deadline(30, "test")
        self.cluster.connect(deadline)
        return self.cluster, deadline

    def __exit__(self, *_: object) -> None:
        self.cluster.close()


@pytest.fixture(scope="module")
def place(onceflow_broker: str) -> Callable[[list[bytes], int], dict[bytes, int]]:
    """Where librdkafka's murmur2 partitioner puts keys, by trying."""
    known: dict[int, dict[bytes, int]] = {}

    def find(keys: list[bytes], partitions: int) -> dict[bytes, int]:
        places = known.setdefault(partitions, {})
        missing = set(keys) - set(places)
        if missing:
            topic = f"places-{uuid.uuid4().hex[:8]}"
            create_topic(onceflow_broker, topic, partitions)
            independent.fill(onceflow_broker, topic, [(key, None) for key in missing])
            places |= {s.key: s.partition for s in independent.read_topic(onceflow_broker, topic) if s.key is not None}
        return places

    return find


@pytest.fixture
def make_state(
    onceflow_broker: str, make_topic: Callable[..., str], place: Any, tmp_path: Path
) -> Callable[..., State]:
    """``make_state(partitions=2, keys=200)``: a flow that has committed two batches of rows."""

    def make(partitions: int = 2, keys: int = 200) -> State:
        source = make_topic("in", 2)
        table = source.replace("in-", "table-", 1)
        for name in (table, f"{table}-internal"):  # before they are looked for: that would take its time
            create_topic(onceflow_broker, name, partitions, {"cleanup.policy": "compact"})
        with connected(onceflow_broker) as (cluster, deadline):
            progress_log.ensure_topic(cluster, deadline)
            made = topics.ensure_topics(cluster, table, partitions, deadline)
            ids = {**made.ids, source: cluster.topic(source, deadline).topic_id, "gone": "x"}
        progress = Progress(
            flow=f"flow-{source}",
            batch_id=0,
            offsets={source: {0: 5, 1: 6}},
            topic_ids=ids,
            time_ms=TIME_MS,
            changelogs={name: dict.fromkeys(range(partitions), 0) for name in made.ids},
            tables={table: TableProgress(3, 77)},
        )
        state = State(onceflow_broker, progress.flow, source, table, tmp_path, place, progress)
        if keys:
            state.fill(keys)
        return state

    return make


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move before anybody can know of the new partitions."""
    monkeypatch.setattr(repartition, "_KNOWN_S", 0.0)


# ---- rows ------------------------------------------------------------------------------------------------


def test_rows_move(make_state: Any) -> None:
    """To a count that is no multiple of the old one, then once more."""
    state = make_state(2, 300)
    state.check(2)
    assert state.check_stores() == ["restored"] * 2
    before = state.committed()
    done = state.run(5)
    assert (done["before"], done["partitions"]) == (2, 5)
    old, new = state.places(2), state.places(5)
    moved = [topic for topic, key in state.expected if old[state.user(topic, key)] != new[state.user(topic, key)]]
    assert (done["rows"], done["internal_rows"]) == (moved.count(state.table), moved.count(state.internal))
    state.check(5)
    after = state.committed()
    assert (after.batch_id, after.tables, after.offsets) == (before.batch_id, before.tables, before.offsets)
    assert after.producer_id == before.producer_id
    assert after.producer_epoch > before.producer_epoch
    assert state.check_stores() == ["caught up"] * 2 + ["restored"] * 3
    assert state.check_stores() == ["in sync"] * 5
    # Deletes of the last time are still there, and are no rows in the wrong place.
    state.run(8)
    state.check(8)
    state.check_stores()
    shutil.rmtree(state.tmp_path / state.flow)
    assert state.check_stores() == ["restored"] * 8


def test_it_is_done_already(make_state: Any) -> None:
    state = make_state(2, 20)
    assert state.run(2)["rows"] == 0
    state.check(2)
    result = CliRunner().invoke(cli, state.arguments(2))
    assert result.output == f"Table {state.table} has its rows in 2 partitions already.\n"
    result = CliRunner().invoke(cli, state.arguments(5))
    assert "went from 2 to 5 partitions" in result.output
    state.check(5)


def test_an_empty_table(make_state: Any) -> None:
    state = make_state(2, 0)
    state.write({}, batch=1)
    assert state.run(5)["rows"] == 0
    state.check(5)
    assert state.stores() == ({}, ["restored"] * 5)


@pytest.mark.long_but("2-5")
@pytest.mark.parametrize("table,internal", [(5, 5), (2, 5), (4, 3)])
def test_topics_that_were_altered_before(make_state: Any, table: int, internal: int) -> None:
    state = make_state(2, 50)
    for topic, partitions in ((state.table, table), (state.internal, internal)):
        if partitions > 2:
            state.alter(topic, partitions)
    state.run(5)
    state.check(5)
    state.check_stores()


def test_a_source_that_is_gone(make_state: Any) -> None:
    """Its offsets stay in progress; the group cannot have them."""
    state = make_state(2, 20)
    kept = state.progress.offsets
    state.progress = replace(state.progress, offsets={**kept, "gone": {0: 1}})
    with connected(state.bootstrap) as (cluster, deadline):
        transactions = Transactions(cluster, f"onceflow.{state.flow}")
        transactions.init(deadline)
        transactions.begin(deadline)
        progress_log.write_progress(cluster, transactions, Names(state.flow), state.progress, kept, deadline)
        transactions.commit(deadline, flow=state.flow, doing="tested")
    state.run(5)
    state.check(5)
    assert state.committed().offsets["gone"] == {0: 1}


# ---- refused ---------------------------------------------------------------------------------------------


def test_it_asks_first(make_state: Any) -> None:
    state = make_state(2, 20)
    words = [word for word in state.arguments(5) if word != "--yes"]
    answer = CliRunner().invoke(cli, words, input="n\n")
    assert answer.exit_code == 1
    assert f"Stop flow {state.flow}, and give its table {state.table} 5 partitions" in answer.stderr
    assert state.committed().changelogs == state.progress.changelogs
    state.check(2)


def test_fewer_partitions_are_refused_before_anybody_is_fenced(make_state: Any) -> None:
    state = make_state(2, 20)
    state.alter(state.table, 4)
    state.alter(state.internal, 5)
    with connected(state.bootstrap) as (cluster, deadline):
        driver = Transactions(cluster, f"onceflow.{state.flow}")
        driver.init(deadline)
        with pytest.raises(onceflow.OptionError, match=r"(?s)4 partitions already.*another name"):
            state.run(3)
        with pytest.raises(onceflow.OptionError, match=r"(?s)-internal has 5 partitions already.*--partitions 5"):
            state.run(4)
        driver.renew(deadline)
        state.run(5)
        with pytest.raises(onceflow.FencedError):
            driver.renew(deadline)
    state.check(5)


def test_what_is_not_there(make_state: Any) -> None:
    state = make_state(2, 20)
    flow, state.flow = state.flow, "somebody-else"
    with pytest.raises(onceflow.ProgressConflictError, match="has no progress here"):
        state.run(5)
    state.flow = f"{flow}x"
    with pytest.raises(onceflow.ProgressConflictError) as misspelled:
        state.run(5)
    assert f"did you mean {flow}?" in misspelled.value.next_step
    state.flow = flow
    table, state.table = state.table, "nothing"
    with pytest.raises(onceflow.UnknownTopicError, match="nothing"):
        state.run(5)
    state.table = state.source
    with pytest.raises(onceflow.OptionError, match=f"Topic {state.source} is no table of a flow"):
        state.run(5)
    state.table = table
    admin = AdminClient({"bootstrap.servers": state.bootstrap})
    admin.delete_topics([table])[table].result(30)
    with connected(state.bootstrap) as (cluster, deadline):
        topics.ensure_topics(cluster, table, 2, deadline)
    with pytest.raises(onceflow.ProgressConflictError, match="deleted and created again"):
        state.run(5)


@pytest.mark.parametrize("wrong", ["stray", "new partition"])
def test_what_no_processor_has_written(make_state: Any, wrong: str) -> None:
    """Nothing moves, and nothing stays open."""
    state = make_state(2, 20)
    somewhere = 1 - state.place([b"foreign"], 2)[b"foreign"]
    if wrong == "stray":
        state.write({(state.table, somewhere): [(b"foreign", Row(b"x", TIME_MS))]}, batch=3)
        message = "holds rows whose keys belong to other partitions"
    else:
        state.alter(state.table, 4)
        known, state.progress = (
            state.progress,
            replace(state.progress, changelogs={state.table: {3: 0}, state.internal: {}}),
        )
        state.write({(state.table, 3): [(b"foreign", Row(b"x", TIME_MS))]}, batch=3)
        state.progress = known
        state.write({}, batch=4)
        message = "Partition 3 of .* holds rows"
    before = state.committed()
    with pytest.raises(onceflow.ProgressConflictError, match=message):
        state.run(5)
    assert state.committed() == before
    assert transaction_state(state) != "Ongoing"


def transaction_state(state: State) -> str:
    with connected(state.bootstrap) as (cluster, deadline):
        return str(describe_transaction(cluster, f"onceflow.{state.flow}", deadline)["state"])


# ---- others that read the table --------------------------------------------------------------------------


class Asking:
    """Threads that ask query servers for keys that exist, and for their number, all the time.

    Attributes:
        wrong: answers that are neither right nor 503.
        right, later: how many answers were right, and how many 503.
    """

    def __init__(self, urls: list[str], state: State) -> None:
        self.urls, self.topic = urls, state.table
        self.expected = {key: value for (topic, key), (value, _, _) in state.expected.items() if topic == state.table}
        self.wrong: list[str] = []
        self.right = self.later = 0
        self._ended = threading.Event()
        ways = [self._one, self._fresh, self._many, self._count, self._range]
        self._threads = [threading.Thread(target=self._run, args=(n, way)) for n, way in enumerate(ways)]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, seed: int, way: Callable[..., httpx.Response]) -> None:
        chosen = random.Random(seed)
        with httpx.Client(timeout=30) as client:
            while not self._ended.is_set():
                try:
                    found = way(client, chosen, f"{chosen.choice(self.urls)}/tables/{self.topic}")
                    if found.status_code == 503:
                        assert found.headers["Retry-After"]
                        self.later += 1
                    else:
                        self.right += 1
                except AssertionError as wrong:
                    self.wrong.append(str(wrong)[:500])

    def _one(self, client: httpx.Client, chosen: random.Random, url: str, query: str = "") -> httpx.Response:
        key = chosen.choice(list(self.expected))
        found = client.get(f"{url}/keys/{quote(key, safe='')}{query}")
        assert found.status_code == 503 or found.json().get("value") == self.expected[key].decode(), found.text
        return found

    def _fresh(self, client: httpx.Client, chosen: random.Random, url: str) -> httpx.Response:
        return self._one(client, chosen, url, "?max_staleness=1s&wait=3s")

    def _many(self, client: httpx.Client, chosen: random.Random, url: str) -> httpx.Response:
        keys = chosen.sample(list(self.expected), 20)
        found = client.post(f"{url}/multi-get", json={"keys": [key.decode() for key in keys]})
        rows_found = [(row["key"].encode(), row["value"].encode()) for row in found.json().get("rows", ())]
        assert found.status_code == 503 or rows_found == [(key, self.expected[key]) for key in keys], found.text
        return found

    def _count(self, client: httpx.Client, chosen: random.Random, url: str) -> httpx.Response:
        found = client.get(f"{url}/count")
        assert found.status_code == 503 or found.json()["count"] == len(self.expected), found.text
        return found

    def _range(self, client: httpx.Client, chosen: random.Random, url: str) -> httpx.Response:
        found = client.get(f"{url}/range", params={"limit": 1000})
        keys = [row["key"].encode() for row in found.json().get("rows", ())]
        assert found.status_code == 503 or keys == sorted(self.expected), found.text
        return found


@pytest.mark.long
def test_without_marks_rows_are_missing(make_state: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next test looks for is there: a repartitioning without marks is broken on purpose."""
    monkeypatch.setattr(Repartitioner, "_mark", lambda *_, **__: None)
    state = make_state(2, 200)
    client = serve({state.table: Format.of("text", "text")}, state_dir=state.tmp_path / "served")
    with Asking([str(client.base_url).rstrip("/")], state) as asking:
        wait_until(lambda: asking.right > 50, 30, lambda: str(asking.wrong))
        assert asking.wrong == []
        state.run(3)
        wait_until(lambda: asking.wrong, 30, "a key is missing")


@pytest.mark.long
@pytest.mark.parametrize("instances", [1, 2])
def test_a_query_server_while_rows_move(make_state: Any, serve: Serve, instances: int) -> None:
    """A key that exists is never missing: it is answered, or the client is told to ask again. Counts and ranges have
    every row once. The stream of changes says nothing, because no value changes."""
    state = make_state(2, 200)
    given: dict[str, Any] = {} if instances == 1 else {"instances": f"group-{state.table}", "ready": False}
    tables = {state.table: Format.of("text", "text")}
    clients = [serve(tables, state_dir=state.tmp_path / f"served-{n}", **given) for n in range(instances)]

    def ready() -> bool:
        return all(client.get("/ready").status_code == 200 for client in clients)

    def listed(client: httpx.Client) -> list[Any]:
        found: list[Any] = client.get(f"/tables/{state.table}").json()["partitions"]
        return found

    wait_until(ready, 30, lambda: clients[0].get("/ready").text)
    urls = [str(client.base_url).rstrip("/") for client in clients]
    with Asking(urls, state) as asking, clients[0].stream("GET", f"/tables/{state.table}/changes") as changes:
        wait_until(lambda: asking.right > 50, 30, lambda: str(asking.wrong))
        for partitions in (3, 7):
            if partitions == 7:  # they are known before rows move
                state.alter(state.table, partitions)
                wait_until(lambda: len(listed(clients[0])) == 7, 60, lambda: clients[0].get("/tables").text)
            state.run(partitions)

            def known(wanted: int = partitions) -> bool:
                return ready() and all(len(listed(client)) == wanted for client in clients)

            wait_until(known, 60, lambda: clients[0].get("/tables").text)
            enough = asking.right + 100
            wait_until(lambda enough=enough: asking.right > enough, 60, lambda: f"{asking.later} {asking.wrong[:3]}")
        key = next(iter(asking.expected))
        later = [(state.table, key, key, b"the first change", [])]
        state.progress = state.committed()
        asking.__exit__()
        state.commit(later, batch=3)
        events = (json.loads(line[6:]) for line in changes.iter_lines() if line.startswith("data: "))
        first = next(event for event in events if "key" in event)
        assert (first["key"], first["value"]) == (key.decode(), "the first change")
    assert asking.wrong == []


def test_a_table_while_rows_move(make_state: Any) -> None:
    """It does not have the new partitions. Its look-ups say so before a row seems to be missing."""
    state = make_state(2, 200)
    expected = {key: value for (topic, key), (value, _, _) in state.expected.items() if topic == state.table}
    changes: list[Any] = []
    with onceflow.Table(state.table, bootstrap_servers=state.bootstrap, state_dir=state.tmp_path / "t") as table:
        table.on_change(changes.append)
        thread = threading.Thread(target=state.run, args=(5,))
        thread.start()

        def ask() -> None:
            for key in itertools.cycle(expected):
                assert table.get(key) == expected[key]

        with pytest.raises(onceflow.UnknownTopicError, match="has 5 partitions now, it had 2"):
            ask()
        thread.join(60)
    assert changes == []
    with onceflow.Table(state.table, bootstrap_servers=state.bootstrap, state_dir=state.tmp_path / "t") as table:
        assert dict(table.range()) == expected


@pytest.mark.long
def test_a_join_that_starts_while_rows_move(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for them, and until they are visible in all partitions. Else it would miss rows for a moment."""
    state = make_state(2, 50)
    at = hooks.at

    def fail(name: str, **fields: Any) -> None:
        at(name, **fields)
        if name == "write":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "at", fail)
        with pytest.raises(SystemExit):
            main(state.arguments(5))
    with connected(state.bootstrap) as (cluster, deadline):
        with monkeypatch.context() as patched:
            patched.setattr(joins, "_ROWS_WAIT_S", 0.5)
            with pytest.raises(onceflow.ProgressConflictError, match="5 partitions, and its rows are still in") as no:
                joins.find_joined(cluster, state.table, deadline)
            assert f"onceflow table repartition {state.flow} {state.table} --partitions 5" in no.value.next_step
        looks: list[str] = []
        spied = joins.writer_of
        monkeypatch.setattr(joins, "writer_of", lambda *given: (looks.append("progress"), spied(*given))[1])
        ends = joins.list_offsets
        monkeypatch.setattr(joins, "list_offsets", lambda *given, **how: (looks.append("ends"), ends(*given, **how))[1])

        def started(until: Callable[[], object], then: Callable[[], object]) -> int:
            """A start that waits until something is done; the partitions that it finds."""
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(joins.find_joined, cluster, state.table, Deadline(60, "a start"))
                wait_until(until, 30, "a start that waits")
                assert not found.done()
                then()
                return found.result(60).info.partitions

        assert started(lambda: looks.count("progress") > 2, lambda: state.run(5)) == 5
    producer = Producer({"bootstrap.servers": state.bootstrap, "transactional.id": f"open-{state.table}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(state.table, b"undecided", b"k", partition=4)
    assert producer.flush(30) == 0
    looks.clear()
    with connected(state.bootstrap) as (cluster, _):
        assert started(lambda: looks.count("ends") > 4, lambda: producer.abort_transaction(30)) == 5
        committed = replace(state.committed(), driver=DriverProcess("host", 1, TIME_MS))
        progress_log.write_progress(cluster, None, Names(state.flow), committed, {}, Deadline(30, "a commit"))
        producer.begin_transaction()
        producer.produce(state.table, b"undecided", b"k", partition=4)
        assert producer.flush(30) == 0
        found = joins.find_joined(cluster, state.table, Deadline(30, "a start"))
        assert found.info.partitions == 5, "its driver has committed since: nothing to wait for"
        producer.abort_transaction(30)


# ---- when it ends early ----------------------------------------------------------------------------------


@pytest.mark.long_but("progress")
@pytest.mark.parametrize(
    "step",
    [pytest.param("init", marks=pytest.mark.long), "write", "progress", pytest.param("end", marks=pytest.mark.long)],
)
def test_killed(make_state: Any, step: str) -> None:
    state = make_state(2, 100)
    state.stores()
    environment = {**os.environ, hooks.VARIABLE: faults.fault(step, "kill", flow=state.flow)}
    command = [sys.executable, "-m", "onceflow.cli.main", *state.arguments(5)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -9, killed.stderr
    assert (transaction_state(state) == "Ongoing") is (step in ("write", "progress"))
    done = state.run(5)
    assert done["before"] == (5 if step == "end" else 2)
    state.check(5)
    assert state.check_stores() == ["caught up"] * 2 + ["restored"] * 3


def test_interrupted(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: the transaction is aborted at once, readers of the table are not held up."""
    state = make_state(2, 50)
    at = hooks.at

    def interrupt(name: str, **fields: Any) -> None:
        at(name, **fields)
        if name == "progress":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "at", interrupt)
        with pytest.raises(SystemExit) as ended:
            main(state.arguments(5))
    assert ended.value.code == 130
    assert transaction_state(state) in ("PrepareAbort", "CompleteAbort")
    deadline = Deadline(30, "the abort is complete")
    while transaction_state(state) != "CompleteAbort":  # until then its records look undecided
        deadline.pause(0, "the abort is not complete")
    assert state.committed().changelogs == state.progress.changelogs
    state.run(5)
    state.check(5)


def test_another_driver_starts_meanwhile(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(2, 50)

    def started(name: str, **_: Any) -> None:
        if name == "write":
            with connected(state.bootstrap) as (cluster, deadline):
                Transactions(cluster, f"onceflow.{state.flow}").init(deadline)

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "at", started)
        with pytest.raises(onceflow.FencedError):
            state.run(5)
    state.run(5)
    state.check(5)


@pytest.mark.long
def test_timeouts(make_state: Any, inject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(2, 50)
    with pytest.raises(onceflow.OptionError, match=r"INVALID_TRANSACTION_TIMEOUT"):
        state.run(5, "--transaction-timeout", "1 hour")
    result = CliRunner().invoke(cli, state.arguments(5, "--transaction-timeout", "soon"))
    assert result.exit_code == 2
    inject("write", "pause", seconds=1.2)
    with pytest.raises(onceflow.TransactionTimeoutError, match=r"(?s)timeout of 1 s.*--transaction-timeout"):
        state.run(5, "--transaction-timeout", "1 second")
    assert state.committed().changelogs == state.progress.changelogs
    # The brokers of the tests allow 15 minutes; by default, what they refuse is not insisted on.
    monkeypatch.setattr(flow_transaction, "TIMEOUT_MS", 3_600_000)
    state.run(5)
    state.check(5)


# ---- with a flow -----------------------------------------------------------------------------------------


def table_rows(pipe: Any) -> dict[bytes, Any]:
    """Last value per key and partition: a tombstone where a row was may be read after the row where it is now."""
    last = {(s.partition, s.key): s.value for s in independent.read_topic(pipe.bootstrap, pipe.table, decided=True)}
    live = [(key, json.loads(value)) for (_, key), value in last.items() if value is not None]
    assert len(dict(live)) == len(live), "a key is in two partitions"
    return dict(live)


def test_a_flow_goes_on(make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its running driver is fenced; the next one finds outputs, state and local stores as they must be."""
    pipe = make_state_pipe(partitions=2, target_partitions=4)
    monkeypatch.setattr(type(pipe), "table_rows", table_rows)
    state = State(pipe.bootstrap, pipe.flow, pipe.source, pipe.table, pipe.tmp_path, lambda *_: {}, None)  # type: ignore[arg-type]
    pipe.fill(1000)
    query = pipe.start()
    query.processAllAvailable()
    assert state.run(4)["internal_rows"] > 0
    pipe.fill(300)
    with pytest.raises(onceflow.FencedError):
        query.awaitTermination(60)
    pipe.run()
    pipe.check()
    assert state.run(6)["before"] == 4
    pipe.fill(300)
    pipe.run(engine="tasks")
    pipe.check()
    assert {int(folder.name) for folder in pipe.folder.iterdir()} == set(range(6))
    shutil.rmtree(pipe.state_dir)
    pipe.fill(100)
    pipe.run()
    pipe.check()
