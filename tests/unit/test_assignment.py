"""Which instance of the query server has which partition."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.server.assignment import Holders, Member, assign


def members(holders: Holders, addresses: list[str], *, restored: bool = True) -> list[Member]:
    """Instances after they have got what was assigned to them."""
    found = []
    for address in addresses:
        here = {
            topic: frozenset(partition for partition, listed in enumerate(partitions) if address in listed)
            for topic, partitions in holders.items()
        }
        found.append(Member(address, frozenset("ab"), *((here, {}) if restored else ({}, here))))
    return found


@given(
    counts=st.tuples(st.integers(1, 9), st.integers(0, 5)),
    copies=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    restored=st.booleans(),
)
def test_partitions_are_shared(counts: tuple[int, int], copies: int, sizes: list[int], restored: bool) -> None:
    partitions = dict(zip("ab", counts, strict=True))
    holders: Holders = {}
    for size in sizes:  # instances come and go
        addresses = [f"http://{n}" for n in range(size)]
        there = members(holders, addresses, restored=restored)
        holders = assign(there, partitions, copies)
        usual = min(copies, size)
        ranks = {each.address: each for each in there}
        owned: Counter[str] = Counter()
        for topic, count in partitions.items():
            assert len(holders[topic]) == count
            for partition, listed in enumerate(holders[topic]):
                assert len(set(listed)) == len(listed)
                up_to_date = [each.address for each in there if each.rank(topic, partition) == 2]
                # One more, for the time until the others have restored it.
                assert len(listed) == usual or (len(listed) == usual + 1 and listed[0] in up_to_date)
                assert not up_to_date or ranks[listed[0]].rank(topic, partition) == 2
                owned[listed[0]] += 1
        # When everything is restored, only what was there for the time being goes away. Then nothing moves any more.
        settled = assign(members(holders, addresses), partitions, copies)
        assert all(len(listed) == usual for topic in settled for listed in settled[topic])
        assert all(
            set(now) <= set(then) for topic in settled for now, then in zip(settled[topic], holders[topic], strict=True)
        )
        assert assign(members(settled, addresses), partitions, copies) == settled
        loads = Counter(address for topic in settled for listed in settled[topic] for address in listed)
        assert max(loads[address] for address in addresses) - min(loads[address] for address in addresses) <= 1


def test_a_new_instance_takes_partitions_over_when_it_has_them() -> None:
    both = assign([Member(name, frozenset("a")) for name in ("one", "two")], {"a": 6}, 1)
    assert Counter(listed[0] for listed in both["a"]) == {"one": 3, "two": 3}
    there = members(both, ["one", "two", "three"])
    moving = assign(there, {"a": 6}, 1)
    moved = [(before, now) for before, now in zip(both["a"], moving["a"], strict=True) if before != now]
    assert len(moved) == 2
    assert all(now == [*before, "three"] for before, now in moved)
    after = assign(members(moving, ["one", "two", "three"]), {"a": 6}, 1)
    assert Counter(listed[0] for listed in after["a"]) == {"one": 2, "two": 2, "three": 2}
    # One that has a copy on its disk gets it again.
    left = assign(members(after, ["one", "two"]), {"a": 6}, 1)
    copies = {"a": frozenset(at for at, listed in enumerate(after["a"]) if listed == ["three"])}
    back = [*members(left, ["one", "two"]), Member("three", frozenset("a"), {}, copies)]
    again = assign(back, {"a": 6}, 1)
    assert {at for at, listed in enumerate(again["a"]) if "three" in listed} == copies["a"]


def test_instances_get_only_tables_that_they_serve() -> None:
    one, both = Member("one", frozenset("a")), Member("both", frozenset("ab"))
    holders = assign([one, both], {"a": 2, "b": 2}, 2)
    assert all(set(listed) == {"one", "both"} for listed in holders["a"])
    assert holders["b"] == [["both"], ["both"]]
    assert assign([], {"a": 1}, 1) == {"a": [[]]}


@pytest.mark.long_but("sizes1-2")
@pytest.mark.parametrize("sizes, copies", [((10, 11), 1), ((10, 9), 2), ((3, 4), 2)])
@pytest.mark.slow
def test_ten_thousand_partitions(sizes: tuple[int, ...], copies: int) -> None:
    """It took minutes: each move was searched among all partitions. The group waits for its leader for 30 seconds."""
    partitions = {"a": 10_000}
    holders: Holders = {}
    for size in sizes:
        there = members(holders, [f"http://{n}" for n in range(size)])
        began = time.process_time()
        holders = assign(there, partitions, copies)
        assert time.process_time() - began < 10
        before = {each.address: each.restored.get("a", frozenset()) for each in there}
        settled = assign(members(holders, [each.address for each in there]), partitions, copies)
        loads = Counter(address for listed in settled["a"] for address in listed)
        assert max(loads.values()) - min(loads.values()) <= 1
        if any(before.values()):  # about as few move as can be
            usual = 10_000 * min(copies, size) // size + 1
            new = sum(place not in before[each] for place, listed in enumerate(settled["a"]) for each in listed)
            lacking = sum(max(0, usual - len(kept)) for kept in before.values())
            assert new <= 1.2 * lacking
