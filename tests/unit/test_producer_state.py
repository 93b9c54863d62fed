"""The producer against a broker that errs: same bytes again, in order, each once; or an error, in bounded time.

No sockets: the broker is a model, `broker_model.World`.
"""

from __future__ import annotations

import collections
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kafka.errors as kafka_errors
import pytest
from kafka.future import Future

from onceflow.client import produce
from onceflow.client.auth.sources import TokenUnavailableError
from onceflow.client.produce import MAX_IN_FLIGHT, Acknowledged, Producer
from onceflow.errors import (
    AuthenticationFailedError,
    BadRecordError,
    BatchAbortedError,
    BrokerUnsupportedError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    PermissionDeniedError,
    TransactionTimeoutError,
    UnknownTopicError,
)
from onceflow.protocol.batches import EncodedBatch

sys.path.insert(0, str(Path(__file__).parent))
try:
    from broker_model import DELAY, LOST, Arrived, Connection, Script, World, encode, raws
finally:
    sys.path.pop(0)


@pytest.fixture(autouse=True)
def _no_error_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """kafka-python only logs what a callback raises."""
    monkeypatch.setattr(Future, "error_on_callbacks", True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(produce, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def errs(*codes: Any) -> Script:
    """Answers in order of arrival; afterwards no errors."""
    left = list(codes)
    return lambda _: left.pop(0) if left else 0


def assert_exactly_once(world: World, sent: dict[tuple[str, int], list[EncodedBatch]]) -> None:
    assert {place: [b.raw for b in log.batches] for place, log in world.logs.items() if log.batches} == {
        place: raws(batches) for place, batches in sent.items() if batches
    }


# ---- without errors ----------------------------------------------------------------------------------


def test_everything_once_in_order(world: World) -> None:
    batches = encode(30, per_batch=3)
    producer = world.producer()
    for one in batches:
        producer.send("out", 0, one)
    assert producer.flush() == {("out", 0): Acknowledged(1000, 90, sum(b.nbytes for b in batches))}
    assert_exactly_once(world, {("out", 0): batches})
    assert len(world.arrived) == 30


def test_many_partitions_share_requests(world: World) -> None:
    producer = world.producer()
    sent = {(topic, p): encode(5) for topic in ("a", "b") for p in range(6)}
    world.answers_per_poll = lambda: 0
    for step in range(5):
        for (topic, partition), batches in sent.items():
            producer.send(topic, partition, batches[step])
    world.answers_per_poll = lambda: 99
    done = producer.flush()
    assert_exactly_once(world, sent)
    assert {place: d.count for place, d in done.items()} == dict.fromkeys(sent, 5)
    assert len(world.requests) == 1 + 4 + 4, "one enrols the first partition, its next enrols all others, then theirs"


def test_one_enrolling_request_at_a_time(world: World) -> None:
    """A connection is served one request at a time: those that wait are enrolled together."""
    producer = world.producer()
    world.answers_per_poll = lambda: 0
    for partition in range(4):
        producer.send("out", partition, encode(1)[0])
    world.answers_per_poll = lambda: 1
    producer.flush()
    assert [sum(len(topic.partition_data) for topic in request.topic_data) for request in world.requests] == [1, 3]


def test_small_batches_of_several_partitions_are_one_request(world: World) -> None:
    batches = [encode(1)[0] for _ in range(3)]
    producer = world.producer(gathered_bytes=4 * batches[0].nbytes)
    for partition, one in enumerate(batches):
        producer.send("out", partition, one)
    assert not world.requests
    producer.flush()
    assert len(world.requests) == 1
    assert_exactly_once(world, {("out", partition): [one] for partition, one in enumerate(batches)})


def test_what_is_gathered_is_sent_when_it_is_enough(world: World) -> None:
    batches = encode(9, size=1000)
    producer = world.producer(gathered_bytes=3 * batches[0].nbytes)
    sent = []
    for one in batches:
        producer.send("out", 0, one)
        sent.append(len(world.requests) > 0)
    assert sent.index(True) == 2
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


def test_gathering_ends_where_memory_does(world: World) -> None:
    batches = encode(9, size=1000)
    producer = world.producer(gathered_bytes=10_000_000, max_unacked_bytes=3 * batches[0].nbytes)
    for one in batches:
        producer.send("out", 0, one)
        assert producer._unacked_bytes <= 3 * batches[0].nbytes
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


def test_flush_without_anything(world: World) -> None:
    assert world.producer().flush() == {}
    assert world.polls == 0


def test_first_batch_of_a_partition_travels_alone(world: World) -> None:
    """It enrols the partition in the transaction; until then nothing may follow it."""
    world.answers_per_poll = lambda: 0
    producer = world.producer()
    batches = encode(10)
    for one in batches:
        producer.send("out", 0, one)
    (connection,) = world.connections.values()
    assert len(connection.waiting) == 1
    world.answers_per_poll = lambda: 99
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})
    assert world.arrived[0].alone


def test_no_more_than_the_broker_remembers_are_under_way(world: World) -> None:
    assert MAX_IN_FLIGHT <= 5
    most = 0

    def one_at_a_time() -> int:
        nonlocal most
        most = max([most, *(len(c.waiting) for c in world.connections.values())])
        return 1

    world.answers_per_poll = lambda: 0
    producer = world.producer()
    for one in encode(20):
        producer.send("out", 0, one)
    world.answers_per_poll = one_at_a_time
    producer.flush()
    assert most == MAX_IN_FLIGHT


@pytest.mark.parametrize("cluster, given, most", [(2, None, 12), (1, None, 11), (1, 2, 12), (2, 1, 11), (2, 0, 11)])
def test_version_of_the_request(world: World, cluster: int, given: int | None, most: int) -> None:
    """Version 12 enrols implicitly, which only a cluster with transaction version 2 can end properly.

    The driver ends the transaction, so what it saw of the cluster goes before what a task sees.
    """
    world.transaction_version = cluster
    producer = world.producer(**({} if given is None else {"transaction_version": given}))
    assert world.connects == 1
    assert world.asked_version == (9, most)
    producer.send("out", 0, encode(1)[0])
    producer.flush()
    assert world.requests[0].header.request_api_version == most


def test_large_batches_get_requests_of_their_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of all partitions could exceed the broker's socket.request.max.bytes."""
    monkeypatch.setattr(produce, "_MAX_REQUEST_BYTES", 80_000)
    producer = world.producer(max_unacked_bytes=100_000_000)
    for partition in range(8):
        producer._partitions["out", partition] = slot = produce._Partition("out", partition)
        slot.queue.append(encode(1, size=30_000)[0])
    producer._pump(wait=False)
    producer.flush()
    assert {a.partition for a in world.arrived} == set(range(8))
    assert [len(r.topic_data[0].partition_data) for r in world.requests] == [2, 2, 2, 2]


# ---- memory ------------------------------------------------------------------------------------------


def test_send_waits_while_too_much_is_unacknowledged(world: World) -> None:
    batches = encode(50, size=1000)
    bound = 5 * batches[0].nbytes
    producer = world.producer(max_unacked_bytes=bound)
    world.answers_per_poll = lambda: 1
    for one in batches:
        producer.send("out", 0, one)
        unacknowledged = sum(b.nbytes for slot in producer._partitions.values() for b in slot.queue)
        assert unacknowledged == producer._unacked_bytes
        assert unacknowledged <= bound
    producer.flush()
    assert producer._unacked_bytes == 0
    assert all(not slot.queue for slot in producer._partitions.values()), "acknowledged batches are kept"
    assert_exactly_once(world, {("out", 0): batches})


def test_one_batch_above_the_bound_still_goes(world: World) -> None:
    batches = encode(3, size=1000)
    producer = world.producer(max_unacked_bytes=10)
    for one in batches:
        producer.send("out", 0, one)
    assert_exactly_once(world, {("out", 0): batches})


# ---- sent again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [19, 51, 6, 3, 5, 7, 13, 20, 14, 15, 16, 56])
def test_identical_bytes_again(world: World, code: int) -> None:
    world.script = errs(code, code, code)
    producer = world.producer()
    (batch,) = encode(1)
    producer.send("out", 0, batch)
    done = producer.flush()
    assert [a.raw for a in world.arrived] == raws([batch]) * 4
    assert_exactly_once(world, {("out", 0): [batch]})
    assert done == {("out", 0): Acknowledged(1000, 1, batch.nbytes)}


@pytest.mark.parametrize("code, asks", [(19, False), (51, False), (6, True), (3, True), (5, True), (LOST, True)])
def test_the_leader_is_looked_up_again_when_it_may_have_moved(world: World, code: Any, asks: bool) -> None:
    world.script = errs(code)
    producer = world.producer()
    producer.send("out", 2, encode(1)[0])
    producer.flush()
    assert world.fresh == ([("out", 2)] if asks else [])


def test_a_moved_partition_is_written_at_its_new_leader(world: World) -> None:
    def moving(_: Arrived) -> int:
        first, world.node = world.node == 1, 2
        return 6 if first else 0

    world.script = moving
    producer = world.producer()
    batches = encode(6)
    for one in batches:
        producer.send("out", 0, one)
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})
    assert set(world.connections) == {1, 2}


def test_retries_wait_longer_and_longer(world: World) -> None:
    times: list[float] = []

    def failing(_: Arrived) -> int:
        times.append(world.now)
        return 51 if len(times) < 9 else 0

    world.script = failing
    producer = world.producer()
    producer.send("out", 0, encode(1)[0])
    producer.flush()
    waits = [b - a for a, b in itertools.pairwise(times)]
    for attempt, wait in enumerate(waits):
        ceiling = min(0.5, 0.005 * 2**attempt)
        assert ceiling / 2 <= wait <= ceiling + 0.06
    assert len(times) == 9


def test_one_failing_partition_does_not_hold_back_others(world: World) -> None:
    world.script = lambda one: 19 if one.partition == 0 and world.now < 110 else 0
    producer = world.producer()
    batches = encode(3)
    for one in batches:
        producer.send("out", 0, one)
        producer.send("out", 1, one)
    while world.now < 105:
        producer._pump(wait=True)
    assert [b.raw for b in world.logs["out", 1].batches] == raws(batches)
    assert world.logs["out", 0].batches == []
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches, ("out", 1): batches})


def queued(world: World, producer: Producer, batches: list[EncodedBatch]) -> None:
    """Enrol with the first batch, then hold ``MAX_IN_FLIGHT`` under way, the rest behind."""
    producer.send("out", 0, batches[0])
    producer.flush()
    world.answers_per_poll = lambda: 0
    for one in batches[1:]:
        producer.send("out", 0, one)
    (connection,) = world.connections.values()
    assert len(connection.waiting) == min(MAX_IN_FLIGHT, len(batches) - 1)
    world.answers_per_poll = lambda: 99
    world.arrived.clear()


@pytest.mark.parametrize("failure", [19, 6, 51])
def test_after_a_failure_all_is_sent_again_in_order(world: World, failure: int) -> None:
    """Those behind the failed one are answered 45, which then only says that it is missing."""
    producer = world.producer()
    batches = encode(9)
    queued(world, producer, batches)
    world.script = errs(failure)
    producer.flush()
    assert [a.sequence for a in world.arrived[:5]] == [1, 2, 3, 4, 1]
    assert world.arrived[4].alone, "sent with others before it was known to be there"
    assert_exactly_once(world, {("out", 0): batches})
    raw_of = dict(enumerate(raws(batches)))
    assert all(a.raw == raw_of[a.sequence] for a in world.arrived), "other bytes under the same numbers"


@pytest.mark.parametrize("position", range(MAX_IN_FLIGHT))
def test_a_failure_anywhere_in_the_window(world: World, position: int) -> None:
    producer = world.producer()
    batches = encode(9)
    queued(world, producer, batches)
    world.script = errs(*[0] * position, 19)
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


@pytest.mark.parametrize("loss", [LOST, DELAY])
@pytest.mark.parametrize("position", range(MAX_IN_FLIGHT))
def test_a_lost_connection(world: World, loss: str, position: int) -> None:
    """What had arrived is recognised by the broker, what had not is taken."""
    producer = world.producer()
    batches = encode(9)
    queued(world, producer, batches)
    world.script = errs(*[0] * position, loss)
    done = producer.flush()
    assert_exactly_once(world, {("out", 0): batches})
    assert done["out", 0].base_offset == 1000
    assert done["out", 0].count == 9


def test_nothing_is_sent_while_answers_of_a_failed_window_are_open(world: World) -> None:
    producer = world.producer()
    batches = encode(9)
    queued(world, producer, batches)
    world.script = errs(19)
    world.answers_per_poll = lambda: 1
    (connection,) = world.connections.values()
    for expected in (3, 2, 1):
        producer._pump(wait=True)
        world.now += 10.0  # no backoff holds it back
        assert len(connection.waiting) == expected
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


@pytest.mark.parametrize("code", [7, 20])
def test_batches_behind_one_that_was_appended_but_not_replicated_in_time(world: World, code: int) -> None:
    producer = world.producer()
    batches = encode(9)
    queued(world, producer, batches)
    world.script = errs(code)
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


def test_a_move_that_another_partition_has_found_out(world: World) -> None:
    """Metadata is refreshed for a whole topic: a partition may learn of its new leader with answers still open."""
    world.refreshes_whole_topic = True
    producer = world.producer()
    batches = encode(4)
    for partition in (0, 1):
        producer.send("out", partition, batches[0])
        producer.flush()
    world.node = 2
    world.answers_per_poll = lambda: 0
    producer.send("out", 0, batches[1])  # to the old leader, which is slow to say that it is the leader no longer
    world.known["out", 0] = 2  # as a refresh for another partition of the topic does
    producer.send("out", 0, batches[2])
    world.answers_per_poll = lambda: 99
    old = world.connections[1]
    slow, old.waiting = old.waiting, collections.deque()
    producer._pump(wait=True)
    old.waiting = slow
    world.script = errs(6)
    producer.flush()
    assert [b.raw for b in world.logs["out", 0].batches] == raws(batches[:3])


@pytest.mark.parametrize("position", [0, 1, MAX_IN_FLIGHT - 1])
def test_46_is_no_acknowledgement(world: World, position: int) -> None:
    """Repeats of ours are among the last five and get no error; so these numbers were used by somebody else."""
    producer = world.producer()
    queued(world, producer, encode(MAX_IN_FLIGHT + 1))
    world.script = errs(*[0] * position, 46)
    with pytest.raises(BatchAbortedError) as caught:
        producer.flush()
    assert "DUPLICATE_SEQUENCE_NUMBER (46)" in caught.value.detail
    with pytest.raises(BatchAbortedError):
        producer.flush()
    assert len(world.arrived) == MAX_IN_FLIGHT, "sent again"


def test_a_repeated_batch_is_acknowledged_with_its_first_offset(world: World) -> None:
    """Other writers have appended in between: the offset is not where the partition ends now."""
    lost = errs(LOST)

    def script(one: Arrived) -> Any:
        world.logs["out", 0].end += 7  # other producers' records
        return lost(one)

    world.script = script
    producer = world.producer()
    (batch,) = encode(1)
    producer.send("out", 0, batch)
    assert producer.flush() == {("out", 0): Acknowledged(1007, 1, batch.nbytes)}
    assert [a.raw for a in world.arrived] == raws([batch]) * 2
    assert_exactly_once(world, {("out", 0): [batch]})


def test_a_response_that_leaves_a_partition_out(world: World) -> None:
    world.script = errs(None)
    producer = world.producer()
    batches = encode(3)
    for one in batches:
        producer.send("out", 0, one)
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


def test_a_connection_that_closes_while_it_is_written_to(world: World) -> None:
    producer = world.producer()
    broken = Connection(world)

    def closed(*_: Any, **__: Any) -> Any:
        world.connections.clear()
        raise RuntimeError("transport is closed")

    broken.send_request = closed  # type: ignore[method-assign]
    world.connections[1] = broken
    batches = encode(3)
    for one in batches:
        producer.send("out", 0, one)
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


@pytest.mark.parametrize("state", ["initializing", "paused", "reauthenticating", "disconnected"])
def test_nothing_is_written_to_a_connection_that_is_not_ready(world: World, state: str) -> None:
    """kafka-python would put the frame's first piece elsewhere than the pieces that follow it."""
    connection = world.get_connection(1)
    if state == "initializing":
        connection.initializing, connection.connected = True, False
    elif state == "paused":
        connection.paused.add("throttle")
    elif state == "reauthenticating":
        connection._reauth.is_reauthenticating = True
    else:
        connection.connected = False
    producer = world.producer()
    batches = encode(3)
    for one in batches:
        producer.send("out", 0, one)
    for _ in range(5):
        producer._pump(wait=True)
    assert connection.correlation_id == 0, "a request was given to it"
    assert not world.arrived
    connection.connected, connection.initializing, connection._reauth.is_reauthenticating = True, False, False
    connection.paused.clear()
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})


def test_a_broker_that_cannot_be_reached_for_a_while(world: World) -> None:
    world.refuse_connection = kafka_errors.NodeNotReadyError("1")
    producer = world.producer()
    batches = encode(3)
    for one in batches:
        producer.send("out", 0, one)
    for _ in range(5):
        producer._pump(wait=True)
    world.refuse_connection = None
    producer.flush()
    assert_exactly_once(world, {("out", 0): batches})
    assert world.fresh, "the leader is not looked up again"


# ---- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, kind",
    [
        (47, FencedError),
        (90, FencedError),
        (48, TransactionTimeoutError),
        (120, BatchAbortedError),
        (45, BatchAbortedError),
        (46, BatchAbortedError),
        (59, BatchAbortedError),
        (10, BadRecordError),
        (87, BadRecordError),
        (29, PermissionDeniedError),
        (53, PermissionDeniedError),
    ],
)
def test_codes_that_end_it(world: World, code: int, kind: type[OnceflowError]) -> None:
    world.script = errs(0, code)
    producer = world.producer()
    first, second = encode(2)
    producer.send("out", 3, first)
    producer.flush()
    with pytest.raises(kind) as caught:  # noqa: PT012
        producer.send("out", 3, second)
        producer.flush()
    assert type(caught.value) is kind
    assert caught.value.topic == "out-3"
    assert f"({code})" in caught.value.detail
    assert caught.value.next_step
    assert len(world.arrived) == 2, "sent again"


def test_a_producer_that_has_failed_stays_so(world: World) -> None:
    """The refused batch must not be sent again, nor flush tell that all is well, whatever the caller makes of it."""
    world.script = errs(48)
    producer = world.producer()
    first, second = encode(2)
    for call in (lambda: producer.send("out", 0, first), lambda: producer.send("out", 0, second), producer.flush):
        with pytest.raises(TransactionTimeoutError):
            call()
    assert len(world.arrived) == 1


def test_the_first_error_of_several_is_raised(world: World) -> None:
    world.script = errs(48, 29)
    producer = world.producer()
    (batch,) = encode(1)
    with pytest.raises(TransactionTimeoutError):  # noqa: PT012
        for partition in (0, 1):
            producer._partitions["out", partition] = slot = produce._Partition("out", partition)
            slot.queue.append(batch)
        producer.flush()


def test_topic_that_stays_unknown(world: World) -> None:
    """A topic just created may be unknown to its broker for a moment; one that was deleted is an error."""
    world.script = lambda _: 3
    producer = world.producer()
    with pytest.raises(UnknownTopicError, match="'out' does not exist"):  # noqa: PT012
        producer.send("out", 0, encode(1)[0])
        producer.flush()
    assert 5 < len(world.arrived) < 60
    assert 109 < world.now < 115  # some seconds: a broker may be slow to learn of a topic


def test_topic_that_is_unknown_for_some_seconds(world: World) -> None:
    until = world.now + 5
    world.script = lambda _: 3 if world.now < until else 0
    producer = world.producer()
    producer.send("out", 0, encode(1)[0])
    assert producer.flush()["out", 0].count == 1


@pytest.mark.parametrize("oldest", [9, 11])
def test_a_leader_that_is_older_than_other_brokers(world: World, oldest: int) -> None:
    """In a rolling upgrade: the request goes out with the version that its own broker understands."""
    world.oldest = oldest
    producer = world.producer()
    producer.send("out", 0, encode(1)[0])
    assert producer.flush()["out", 0].count == 1
    assert [request.header.request_api_version for request in world.requests] == [oldest]


def test_a_leader_that_is_too_old(world: World) -> None:
    world.oldest = 8
    producer = world.producer()
    with pytest.raises(BrokerUnsupportedError, match="too old"):  # noqa: PT012
        producer.send("out", 0, encode(1)[0])
        producer.flush()
    assert not world.arrived


def test_45_of_the_oldest_batch_is_a_gap(world: World) -> None:
    """Nothing is before it: what had been acknowledged is gone, and no retry brings it back."""
    producer = world.producer()
    batches = encode(3)
    producer.send("out", 0, batches[0])
    producer.flush()
    world.script = errs(19, 45, 45, 45, 45, 45)
    with pytest.raises(BatchAbortedError):  # noqa: PT012
        producer.send("out", 0, batches[1])
        producer.flush()
    assert len(world.arrived) == 3


def test_refused_credentials_are_one_of_our_errors(world: World) -> None:
    world.refuse_connection = kafka_errors.SaslAuthenticationFailedError("wrong password")
    producer = world.producer()
    with pytest.raises(AuthenticationFailedError, match="h:9092 refused the credentials") as caught:
        producer.send("out", 0, encode(1)[0])
    assert "wrong password" in caught.value.detail
    assert caught.value.next_step
    world.refuse_connection = None
    with pytest.raises(AuthenticationFailedError):
        producer.flush()
    assert not world.arrived


@pytest.mark.parametrize("again", [False, True])
def test_a_login_that_is_refused_while_a_connection_is_made(world: World, again: bool) -> None:
    """Told at once, unless a new token may do better; several pumps have waited for the one connection."""
    world.login_again = again
    connection = world.connections[1] = Connection(world)
    connection.connected, connection.initializing = False, True
    producer = world.producer()
    producer.send("out", 0, encode(1)[0])
    producer._pump(wait=False)
    connection.initializing = False
    del world.connections[1]
    connection.init_future.failure(kafka_errors.SaslAuthenticationFailedError("token expired"))
    if again:
        producer.flush()
        assert len(world.arrived) == 1
        return
    with pytest.raises(AuthenticationFailedError, match="h:9092 refused the credentials") as caught:
        producer.flush()
    assert "token expired" in caught.value.detail
    assert not world.arrived


def test_a_connection_that_breaks_while_it_is_made_is_made_again(world: World) -> None:
    connection = world.connections[1] = Connection(world)
    connection.connected, connection.initializing = False, True
    producer = world.producer()
    producer.send("out", 0, encode(1)[0])
    del world.connections[1]
    connection.init_future.failure(TokenUnavailableError("the token endpoint is down"))
    producer.flush()
    assert len(world.arrived) == 1


@pytest.mark.parametrize("never", [19, 6, LOST, DELAY])
def test_deadline(world: World, never: Any) -> None:
    world.script = lambda _: never
    producer = world.producer(seconds=30.0)
    with pytest.raises(DeadlineExceededError, match="Gave up after 30 s") as caught:  # noqa: PT012
        producer.send("out", 4, encode(1)[0])
        producer.flush()
    assert "out-4" in caught.value.detail
    assert 130.0 <= world.now < 131.0
    assert len(world.arrived) < 200, "a hot loop"


@pytest.mark.parametrize("silence", ["no answers", "no connection", "never ready"])
def test_deadline_in_silence(world: World, silence: str) -> None:
    if silence == "no answers":
        world.answers_per_poll = lambda: 0
    elif silence == "no connection":
        world.refuse_connection = kafka_errors.NodeNotReadyError("1")
    else:
        world.get_connection(1).paused.add("throttle")
    producer = world.producer(seconds=5.0, max_unacked_bytes=10)
    with pytest.raises(DeadlineExceededError):
        producer.send("out", 0, encode(1)[0])  # send waits for memory, and may not wait forever either
    assert 105.0 <= world.now < 106.0


# ---- any sequence of failures ------------------------------------------------------------------------

SEEDS = 60


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_sequence_of_failures(world: World, seed: int) -> None:
    """Whatever goes wrong on the way: every batch once, in order, and the counts say so."""
    rng = random.Random(seed)
    places = [(topic, p) for topic in ("a", "b")[: rng.randint(1, 2)] for p in range(rng.randint(1, 4))]
    trouble = rng.choice([0.05, 0.2, 0.5])
    kinds: list[Any] = [19, 51, 6, 3, 5, 7, 13, 20, None, LOST, DELAY]
    quiet_after = rng.randint(50, 150)

    def script(one: Arrived) -> Any:
        if len(world.arrived) > quiet_after or rng.random() > trouble:
            return 0
        return rng.choice(kinds)

    world.script = script
    world.answers_per_poll = lambda: rng.choice([0, 1, 1, 2, 3, 99])
    world.shuffle = rng.shuffle
    producer = world.producer(seconds=3600.0, max_unacked_bytes=rng.choice([100, 2_000, 10_000_000]))
    per_batch = rng.randint(1, 3)
    sent = {place: encode(rng.randint(1, 15), per_batch=per_batch) for place in places}
    left = {place: list(batches) for place, batches in sent.items()}
    while any(left.values()):
        place = rng.choice([p for p, batches in left.items() if batches])
        producer.send(*place, left[place].pop(0))
        if rng.random() < 0.1:
            world.node = rng.randint(1, 3)
    done = producer.flush()
    assert_exactly_once(world, sent)
    assert {place: d.count for place, d in done.items()} == {p: per_batch * len(b) for p, b in sent.items()}
    assert {place: d.nbytes for place, d in done.items()} == {p: sum(x.nbytes for x in b) for p, b in sent.items()}
    assert producer._unacked_bytes == 0
    originals = {(place, raw) for place, batches in sent.items() for raw in raws(batches)}
    assert {((a.topic, a.partition), a.raw) for a in world.arrived} == originals, "other bytes were sent"
