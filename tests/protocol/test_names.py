"""Identifiers survive the way to Kafka and back."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onceflow.client.deadline import Deadline
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession, check_owner
from onceflow.errors import FencedError, OptionError, ProgressConflictError
from onceflow.protocol.names import (
    FLOW_NAME_LENGTH_MAX,
    PREFIX_LENGTH_MAX,
    Names,
    flow_of_group_id,
    flow_of_transactional_id,
    transactional_id_of_parked,
    validate_flow_name,
)
from onceflow.protocol.progress import Progress, decode, encode

LEGAL = "abcXYZ019._-"
flows = st.text(LEGAL, min_size=1, max_size=40).filter(lambda name: name not in (".", ".."))
prefixes = st.text(LEGAL, max_size=10)


def test_ids_without_prefix() -> None:
    names = Names("orders")
    assert (names.transactional_id, names.group_id) == ("onceflow.orders", "orders")


@pytest.mark.parametrize("prefix", ["", "team."])
def test_progress_key(prefix: str) -> None:
    """Two prefixes make two flows that do not fence each other: they must not share progress. Groups do not matter."""
    names = Names("orders", transactional_id_prefix=prefix, group_id_prefix="g.")
    assert names.progress_key == f"{prefix}orders"


def test_the_group_has_the_prefix_of_the_transactional_id() -> None:
    """Two flows of one name with different prefixes committed their offsets to one group."""
    assert Names("orders", transactional_id_prefix="team-a.").group_id == "team-a.orders"
    assert Names("orders", transactional_id_prefix="team-a.", group_id_prefix="").group_id == "orders"
    assert Names("orders", transactional_id_prefix="team-a.", group_id_prefix="g.").group_id == "g.orders"


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(flow=flows, first=prefixes, second=prefixes)
def test_round_trip(flow: str, first: str, second: str) -> None:
    names = Names(flow, transactional_id_prefix=first, group_id_prefix=second)
    assert flow_of_transactional_id(names.transactional_id, first) == flow
    assert flow_of_group_id(names.group_id, second) == flow


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(topic=flows)
def test_no_flow_has_the_transactional_id_of_a_command(topic: str) -> None:
    """It would fence the command, and be fenced by it."""
    taken = transactional_id_of_parked(topic)
    for prefix in (taken[:n] for n in range(len(taken))):
        flow = flow_of_transactional_id(taken, prefix)
        if flow is not None and len(prefix) <= PREFIX_LENGTH_MAX:
            with pytest.raises(OptionError, match="are those of commands"):
                Names(flow, transactional_id_prefix=prefix)


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(flows, prefixes, flows, prefixes, st.sampled_from(["c1", "c2", ""]), st.sampled_from(["c1", "c2", ""]))
def test_flows_that_do_not_fence_each_other_have_different_identities(
    flow: str, prefix: str, other_flow: str, other_prefix: str, cluster: str, other_cluster: str
) -> None:
    one, other = Names(flow, transactional_id_prefix=prefix), Names(other_flow, transactional_id_prefix=other_prefix)
    same = (one.transactional_id, cluster) == (other.transactional_id, other_cluster)
    assert (one.identity(cluster) == other.identity(other_cluster)) is same


def test_the_identity_of_a_flow() -> None:
    names = Names("orders", transactional_id_prefix="a.", group_id_prefix="g.")
    assert names.identity("MkU3OEVBNTcwNTJENDM2Qg") == "a.onceflow.orders@MkU3OEVBNTcwNTJENDM2Qg"
    assert Names("a.b").identity("c") != Names("b", transactional_id_prefix="a.").identity("c")


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(flows, prefixes, st.integers(0, 99))
def test_the_progress_of_a_flow_whose_prefix_and_name_only_look_the_same_is_refused(
    flow: str, prefix: str, at: int
) -> None:
    one, key = Names(flow, transactional_id_prefix=prefix), prefix + flow
    cut = min(at, len(key) - 1)
    assume(key[cut:] not in (".", "..") and not (key[:cut] + "onceflow." + key[cut:]).startswith("onceflow.admin."))
    other = Names(key[cut:], transactional_id_prefix=key[:cut])
    progress = Progress(one.progress_key, 1, {}, {}, 0, transactional_id=one.transactional_id)
    check_owner(progress, one)
    check_owner(replace(progress, transactional_id=""), other)  # of an earlier onceflow
    check_owner(None, other)
    assert one.progress_key == other.progress_key
    if one == other:
        return
    with pytest.raises(ProgressConflictError, match="Another flow has the progress record") as caught:
        check_owner(progress, other)
    assert one.transactional_id in caught.value.detail
    assert other.transactional_id in caught.value.detail


def test_a_start_refuses_the_progress_of_such_a_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a command. The transactional id of the other flow is left alone."""
    there = Progress("a.b", 7, {"in": {0: 5}}, {"in": "id"}, 0, transactional_id="a.onceflow.b")
    monkeypatch.setattr(progress_log, "read_progress", lambda *_, **__: there)
    monkeypatch.setattr(DriverSession, "_left_open", lambda *_: {})
    session = DriverSession(None, Names("a.b"))  # type: ignore[arg-type]
    with pytest.raises(ProgressConflictError, match=r"Another flow has the progress record 'a\.b'"):
        session.progress({}, Deadline(5, "a test"))
    assert not session.knows_progress


def test_ids_of_others_are_not_ours() -> None:
    assert flow_of_transactional_id("streams-app-1") is None
    assert flow_of_transactional_id("onceflow.") is None
    assert flow_of_transactional_id("onceflow.a b") is None
    assert flow_of_transactional_id("onceflow.orders", "team.") is None
    assert flow_of_group_id("other", "team.") is None


@pytest.mark.parametrize(
    "flow", ["", ".", "..", "a b", "a/b", "größe", "a\n", "x" * (FLOW_NAME_LENGTH_MAX + 1), None, 5]
)
def test_illegal_flow_names(flow: Any) -> None:
    with pytest.raises(OptionError) as caught:
        validate_flow_name(flow)
    assert caught.value.next_step


def test_longest_name_and_illegal_prefixes() -> None:
    assert validate_flow_name("x" * FLOW_NAME_LENGTH_MAX)
    for prefix in ("a b", "x" * 101):
        with pytest.raises(OptionError):
            Names("orders", transactional_id_prefix=prefix)
        with pytest.raises(OptionError):
            Names("orders", group_id_prefix=prefix)


def test_every_record_names_its_flow_also_if_the_one_before_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start, a command or an external sink carry over a record of an earlier onceflow, or of the flow it copies."""
    written: list[Progress] = []

    class Producer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def send(self, topic: str, partition: int, batch: Any) -> None:
            self.place = topic, partition

        def flush(self) -> Any:
            return {self.place: SimpleNamespace(base_offset=5)}

    monkeypatch.setattr(progress_log, "Producer", Producer)
    monkeypatch.setattr(progress_log, "encode_single", lambda key, value, **_: written.append(decode(key, value)))
    names = Names("b", transactional_id_prefix="a.")
    session = DriverSession(None, names)  # type: ignore[arg-type]
    earlier = Progress("a.b", 7, {"in": {0: 5}}, {"in": "id"}, 0)
    for before in (earlier, replace(earlier, transactional_id="a.onceflow.copied")):
        progress_log.write_progress(None, None, names, before, {}, Deadline(5, "a test"))  # type: ignore[arg-type]
        assert written[-1] == replace(earlier, transactional_id="a.onceflow.b")
        check_owner(written[-1], names)
        with pytest.raises(ProgressConflictError, match="Another flow has the progress record"):
            check_owner(written[-1], Names("a.b"))
        # This driver knows the record as its own: it does not take it for that of a newer driver.
        session.committed(before)
        monkeypatch.setattr(DriverSession, "knows_progress", True)
        monkeypatch.setattr(progress_log, "read_progress", lambda *_, **__: written[-1])
        session._sources = {}
        session._check_progress(Deadline(5, "a test"))
        monkeypatch.setattr(progress_log, "read_progress", lambda *_, **__: replace(written[-1], batch_id=8))
        with pytest.raises(FencedError, match="Another driver"):
            session._check_progress(Deadline(5, "a test"))
    assert encode(written[0]) == encode(written[1])
