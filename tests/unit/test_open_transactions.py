"""Which open transactions hang, what an abort would do, and its markers. No sockets: tests make the answers."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from onceflow.admin.transactions import open_transactions as admin
from onceflow.admin.transactions.open_transactions import OpenInPartition, Search, find_open
from onceflow.admin.transactions.transaction_abort import RECENT_MS, Producer, plan
from onceflow.cli import transactions as commands
from onceflow.client import abort_markers, transactional_ids
from onceflow.client.abort_markers import write_abort_marker
from onceflow.client.cluster import ConnectionFailedError, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.producers import OpenTransaction
from onceflow.client.topics import Copies
from onceflow.client.transactional_ids import Listing, TransactionalId, list_surely
from onceflow.clock import clock_ms
from onceflow.errors import OptionError, PermissionDeniedError
from onceflow.protocol.names import Names, progress_keys_of

PLACE = ("out", 0)
SEEN = OpenTransaction(4001, 2, 17, 1_700_000_000_000, coordinator_epoch=3)


def soon() -> Deadline:
    return Deadline(5, "a test")


# ---- which of them hang ----------------------------------------------------------------------------------


class Leaders:
    """One partition with three offsets behind its last stable offset; what is open at the first and second look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = [[SEEN], [SEEN]]
        self.known: dict[int, tuple[str, dict[str, Any]]] = {}
        self.gap = ""
        monkeypatch.setattr(admin, "find_topics", lambda *_: {"out": TopicInfo("out", "id", {0: 1, 1: -1})})
        monkeypatch.setattr(admin, "_held_back", lambda _, places, __: dict.fromkeys(places, 3))
        monkeypatch.setattr(admin, "open_transactions", lambda *_: {PLACE: self.looks.pop(0)})
        monkeypatch.setattr(admin, "_known", lambda *_: (self.known, self.gap))
        monkeypatch.setattr(admin, "_timestamp", lambda *_: 5)

    def find(self) -> Search:
        return find_open(SimpleNamespace(), ["out"], soon())  # type: ignore[arg-type]


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch) -> Leaders:
    return Leaders(monkeypatch)


@pytest.mark.parametrize(
    "state, partitions, hanging",
    [
        ("Ongoing", {"out": [0, 1]}, False),
        ("PrepareCommit", {"out": [0]}, False),
        ("Ongoing", {"out": [1]}, True),
        ("Ongoing", {"other": [0]}, True),
        ("CompleteAbort", {"out": [0]}, True),
        ("Empty", {}, True),
    ],
)
def test_what_the_coordinator_knows_decides(
    leaders: Leaders, state: str, partitions: dict[str, list[int]], hanging: bool
) -> None:
    described = {"state": state, "partitions": partitions, "started_ms": 7, "timeout_ms": 60_000}
    leaders.known = {4001: ("loader", described)}
    search = leaders.find()
    (found,) = search.found
    assert (found.hanging, found.transaction.transactional_id, found.held_back) == (hanging, "loader", 3)
    assert found.since_ms == (5 if hanging else 7)
    assert search.unseen == {"out-1": "it has no leader"}


def test_what_nobody_knows_hangs_if_nothing_is_hidden(leaders: Leaders) -> None:
    assert [each.hanging for each in leaders.find().found] == [True]
    leaders.looks, leaders.gap = [[SEEN], [SEEN]], "broker 2 did not answer"
    assert [each.hanging for each in leaders.find().found] == [None]


@pytest.mark.parametrize("second", [[], [OpenTransaction(4001, 2, 30, 0)]])
def test_what_has_ended_meanwhile_does_not_hang(leaders: Leaders, second: list[OpenTransaction]) -> None:
    leaders.looks = [[SEEN], second]
    assert leaders.find().found == []


@pytest.mark.parametrize(
    "coordinators, broker_gap, may_all, gap",
    [
        ([{0: 1}, {0: 1}], "", True, ""),
        ([{}, {}], "", True, "DESCRIBE on topic __transaction_state"),
        ([{0: 1}, {0: 2}], "", True, "have moved"),
        ([{0: -1}, {0: -1}], "", True, "no leader"),
        ([{0: 1}, {0: 1}], "broker 2 did not answer", True, "broker 2"),
        ([{0: 1}, {0: 1}], "", False, "all transactional ids"),
    ],
)
def test_what_may_be_hidden(
    monkeypatch: pytest.MonkeyPatch, coordinators: list[dict[int, int]], broker_gap: str, may_all: bool, gap: str
) -> None:
    known = [TransactionalId("loader", 4001, "Ongoing")]
    monkeypatch.setattr(transactional_ids, "list_transactional_ids", lambda *_, **__: Listing(known, broker_gap))
    monkeypatch.setattr(transactional_ids, "_may_describe_all", lambda *_: may_all)
    leaders = [{number: Copies(node, [], []) for number, node in each.items()} for each in coordinators]
    monkeypatch.setattr(transactional_ids, "copies", lambda *_: leaders.pop(0))
    cluster: Any = SimpleNamespace(connect=lambda _: None, refresh_brokers=lambda _: None)
    listing = list_surely(cluster, [4001], soon())
    assert listing.ids == known
    assert gap in listing.gap
    assert bool(gap) == bool(listing.gap)


# ---- what an abort would do ------------------------------------------------------------------------------


def producer(state: str, hanging: bool | None = None, *, open_: bool = True, gap: str = "") -> Producer:
    found = [OpenInPartition(*PLACE, SEEN, hanging, 5, 3)] if open_ else []
    return Producer("loader", 4001, 2, state, 7, 60_000, [PLACE], Search(found, gap=gap))


@pytest.mark.parametrize(
    "of, committed_ms, fence, markers, refusal",
    [
        (producer("Ongoing", False), None, True, 0, ""),
        (producer("Ongoing", False), RECENT_MS, True, 0, ""),
        (producer("Ongoing", False), RECENT_MS - 1, True, 0, "seems to run"),
        (producer("Ongoing", True), None, True, 1, ""),
        (producer("CompleteAbort", True), None, False, 1, ""),
        (producer("CompleteCommit", True), None, False, 1, "loses committed records"),
        (producer("CompleteAbort", True), 10 * RECENT_MS, False, 1, "its next start decides"),
        (producer("Dead", None, gap="broker 2"), None, False, 1, "may still have this transaction open: broker 2"),
        (producer("Empty", open_=False), 0, False, 0, ""),
    ],
)
def test_plan(of: Producer, committed_ms: int | None, fence: bool, markers: int, refusal: str) -> None:
    found = plan(of, committed_ms)
    assert (found.fence, len(found.markers)) == (fence, markers)
    assert len(found.refusals) == bool(refusal)
    assert refusal in "".join(found.refusals)


def test_what_a_coordinator_is_ending_is_left_to_it() -> None:
    with pytest.raises(OptionError, match="PrepareCommit: its coordinator is ending it"):
        plan(producer("PrepareCommit", False), None)


def test_the_progress_of_a_transactional_id() -> None:
    for prefix in ("", "team.", "onceflow.", "onceflow.x."):
        names = Names("onceflow.orders", transactional_id_prefix=prefix)
        assert names.progress_key in progress_keys_of(names.transactional_id)
    assert progress_keys_of("loader") == set()


# ---- the marker ------------------------------------------------------------------------------------------


class Leader:
    """Answers markers with these error codes; None: the connection is lost. What is open comes from `looks`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: list[int | None], looks: list[Any]) -> None:
        self.codes, self.looks = codes, looks
        self.sent: list[Any] = []
        monkeypatch.setattr(abort_markers, "open_transactions", lambda *_: {PLACE: [o for o in [looks.pop(0)] if o]})

    def connect(self, deadline: Deadline) -> None: ...

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        return max_version

    def leader(self, *_: Any, **__: Any) -> int:
        return 1

    def exchange(self, request: Any, node: int, deadline: Deadline) -> Any:
        (marker,) = request.markers
        self.sent.append((marker.producer_id, marker.producer_epoch, marker.coordinator_epoch))
        assert marker.transaction_result is False
        code = self.codes.pop(0)
        if code is None:
            raise ConnectionFailedError("lost")
        topics = [SimpleNamespace(partitions=[SimpleNamespace(error_code=code)])]
        return SimpleNamespace(markers=[SimpleNamespace(topics=topics)])


LATER = OpenTransaction(4001, 3, 17, 0, coordinator_epoch=4)
NEXT = OpenTransaction(4001, 2, 40, 0, coordinator_epoch=3)
FIRST = OpenTransaction(4001, 2, 17, 0)


@pytest.mark.parametrize(
    "codes, looks, sent, written",
    [
        ([0], [SEEN], [(4001, 2, 3)], True),
        ([0], [FIRST], [(4001, 2, 0)], True),  # no coordinator has written a marker there
        ([6, 0], [SEEN, SEEN], [(4001, 2, 3)] * 2, True),
        ([52, 0], [SEEN, LATER], [(4001, 2, 3), (4001, 3, 4)], True),
        ([47], [SEEN, None], [(4001, 2, 3)], True),
        ([None], [SEEN, None], [(4001, 2, 3)], True),  # it was written, and its response was lost
        ([None], [SEEN, NEXT], [(4001, 2, 3)], True),  # and the producer has begun another one since
        ([], [None], [], False),
        ([], [NEXT], [], False),
    ],
)
def test_the_marker_is_for_this_transaction(
    monkeypatch: pytest.MonkeyPatch, codes: list[int | None], looks: list[Any], sent: list[Any], written: bool
) -> None:
    leader: Any = Leader(monkeypatch, codes, looks)
    assert write_abort_marker(leader, PLACE, SEEN, soon()) is written
    assert leader.sent == sent


def test_a_marker_needs_a_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    leader: Any = Leader(monkeypatch, [31], [SEEN])
    with pytest.raises(PermissionDeniedError, match="grant ALTER on the cluster"):
        write_abort_marker(leader, PLACE, SEEN, soon())


# ---- times that producers have made up -------------------------------------------------------------------

NANOSECONDS = 1_795_000_000_000_000_000


@pytest.mark.parametrize("at", [-1, -(2**63), 4_070_908_800_000, NANOSECONDS // 1000, NANOSECONDS, 2**63 - 1])
@pytest.mark.parametrize("hanging", [True, False, None])
def test_commands_show_transactions_with_any_time(
    at: int, hanging: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for old ones gets those whose age nobody knows, too."""
    transaction = OpenTransaction(4001, 2, 17, at, "held", "Ongoing" if hanging is False else "", -1, 900_000)
    found = OpenInPartition(*PLACE, transaction, hanging, at, 3)
    producer = Producer("held", 4001, 2, "Ongoing", at, 900_000, [PLACE], Search([found]))
    monkeypatch.setattr(commands, "connected", lambda *_: contextlib.nullcontext((SimpleNamespace(), soon())))
    monkeypatch.setattr(admin, "find_open", lambda *_: Search([found]))
    monkeypatch.setattr("onceflow.admin.transactions.transaction_abort.describe", lambda *_: producer)
    servers = ["--bootstrap-servers", "127.0.0.1:1"]
    for command in (["list"], ["list", "--min-age", "1 hour"], ["describe", "held"]):
        for form in ([], ["--json"]):
            done = CliRunner().invoke(commands.transactions, [*command, *servers, *form])
            assert done.exit_code == 0, (done.output, done.exception)
            assert "4001" in done.output
            if command[0] == "list" and form:
                shown = json.loads(done.output.splitlines()[0])
                assert (shown["age_seconds"], shown["last_write"] is None) == (None, at < 0)


def test_an_age_that_is_known() -> None:
    now = clock_ms()
    found = OpenInPartition(*PLACE, OpenTransaction(4001, 2, 17, now - 5_000), True, now - 7_000, 3)
    assert found.age_ms(now) == 7_000
