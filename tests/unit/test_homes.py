"""Where the groups of a table have their homes and standby copies: rules that hold for any cluster."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onceflow.planning.homes import Assignment, Lags, StateHost, assign, tasks_of

LEVEL, FAR = 0, 1_000_000
NOTHING = Assignment()


def host(number: int, *, rack: str = "", cores: int = 1, machine: str = "") -> StateHost:
    return StateHost(f"at-{number}", machine or f"host-{number}", rack, cores)


hosts_of_any_kind = st.lists(
    st.builds(
        StateHost,
        st.integers(0, 11).map(lambda number: f"at-{number}"),
        st.integers(0, 5).map(lambda number: f"host-{number}"),
        st.sampled_from(["", "a", "b", "c"]),
        st.integers(1, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.location,
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[StateHost], dict[tuple[int, str], int], Assignment, int]:
    groups = draw(st.integers(1, 24))
    hosts = draw(hosts_of_any_kind)
    places = [each.location for each in hosts]
    lags = draw(
        st.dictionaries(
            st.tuples(st.integers(0, groups - 1), st.sampled_from(places)),
            st.sampled_from([0, 1, 9_999, 10_000, 10_001, FAR]),
        )
    )
    known = st.dictionaries(st.integers(0, groups - 1), st.sampled_from([*places, "at-gone"]))
    before = Assignment(draw(known), targets=draw(known))
    return groups, hosts, lags, before, draw(st.integers(1, 3))


def present(situation: tuple) -> tuple:
    """The same, but no host is away."""
    groups, hosts, *others = situation
    return groups, [replace(each, away=False) for each in hosts], *others


def settled(
    groups: int, hosts: list[StateHost], lags: Lags, before: Assignment, copies: int = 1
) -> tuple[Assignment, dict[tuple[int, str], int]]:
    """The assignment after all copies were brought up that it asks for, and the copies."""
    now = dict(lags)
    plan = assign(groups, hosts, now, before, copies=copies)
    for _ in range(4):
        for group in range(groups):
            now[group, plan.homes[group]] = LEVEL
        now.update(dict.fromkeys(plan.copies_beside(), LEVEL))
        for removed in plan.surplus:
            now.pop(removed, None)
        plan = assign(groups, hosts, now, plan, copies=copies)
    return plan, now


@given(situations())
def test_every_group_has_a_home_where_a_level_copy_is_if_there_is_one(situation: tuple) -> None:
    groups, hosts, lags, before, copies = situation
    plan = assign(groups, hosts, lags, before, copies=copies)
    places = {each.location for each in hosts if not each.away}
    if not places:
        assert (plan.homes, plan.waiting) == ({}, set(range(groups)))
        return
    for group in range(groups):
        assert plan.homes[group] in places
        level = {at for at in places if lags.get((group, at), FAR) <= 10_000}
        assert (group in plan.waiting) == (not level)
        assert not level or plan.homes[group] in level


@given(situations())
def test_standby_copies_are_on_other_machines(situation: tuple) -> None:
    groups, hosts, lags, before, copies = present(situation)
    machine = {each.location: each.host for each in hosts}
    plan, _ = settled(groups, hosts, lags, before, copies)
    machines = set(machine.values())
    for group in range(groups):
        used = [machine[plan.homes[group]], *(machine[at] for at in plan.standbys.get(group, ()))]
        assert len(set(used)) == len(used) == min(copies, len(machines))


@given(situations())
def test_it_comes_to_rest_balanced_and_without_superfluous_copies(situation: tuple) -> None:
    groups, hosts, lags, before, copies = present(situation)
    plan, now = settled(groups, hosts, lags, before, copies)
    again = assign(groups, hosts, now, plan, copies=copies)
    assert again == plan
    assert not again.restores
    assert not again.waiting
    assert not again.surplus
    cores = sum(each.cores for each in hosts)
    count = Counter(plan.homes.values())
    for each in hosts:
        assert math.floor(groups * each.cores / cores) <= count[each.location] <= math.ceil(groups * each.cores / cores)
    assert {at for _, at in now} <= {each.location for each in hosts}
    assert set(count) <= {each.location for each in hosts}


@given(st.integers(1, 64), st.integers(1, 8))
def test_a_new_host_takes_its_share_and_nothing_else_moves(groups: int, count: int) -> None:
    hosts = [host(number) for number in range(count)]
    plan, copies = settled(groups, hosts, {}, NOTHING)
    more = [*hosts, host(count)]
    moving = assign(groups, more, copies, plan)
    assert moving.homes == plan.homes  # nothing moves before the copies are level
    assert {at for _, at in moving.restores} <= {"at-" + str(count)}
    assert len(moving.restores) <= math.ceil(groups / (count + 1))
    after, _ = settled(groups, more, copies, plan)
    moved = {group for group in range(groups) if after.homes[group] != plan.homes[group]}
    assert moved == {group for group, _ in moving.restores}


@given(st.integers(1, 64), st.integers(2, 8), st.integers(1, 2))
def test_a_host_that_is_lost_costs_its_groups_only(groups: int, count: int, copies: int) -> None:
    hosts = [host(number) for number in range(count)]
    plan, now = settled(groups, hosts, {}, NOTHING, copies)
    left = hosts[1:]
    kept = {(group, at): lag for (group, at), lag in now.items() if at != "at-0"}
    after = assign(groups, left, kept, plan, copies=copies)
    for group in range(groups):
        if plan.homes[group] != "at-0":
            assert after.homes[group] == plan.homes[group]
        elif copies == 2:  # its standby copy goes on at once
            assert after.homes[group] in plan.standbys[group]
    assert bool(after.waiting) == (copies == 1 and any(home == "at-0" for home in plan.homes.values()))


@given(st.integers(2, 64), st.integers(2, 8), st.integers(1, 2))
def test_a_host_that_is_away_for_a_moment_gets_back_what_it_had(groups: int, count: int, copies: int) -> None:
    hosts = [host(number) for number in range(count)]
    plan, now = settled(groups, hosts, {}, NOTHING, copies)
    away = [replace(hosts[0], away=True), *hosts[1:]]
    during = assign(groups, away, now, plan, copies=copies)
    assert "at-0" not in during.homes.values()
    assert during.standbys == plan.standbys, "nobody copies what is there"
    assert {at for _, at in during.copies_beside() if at != "at-0"} <= {at for _, at in plan.copies_beside()}
    assert not during.surplus
    kept = assign(groups, away, now, during, copies=copies)
    assert (kept.homes, kept.standbys) == (during.homes, during.standbys)
    back = assign(groups, hosts, now, kept, copies=copies)
    for group in range(groups):
        assert back.homes[group] == plan.homes[group]
    assert back.standbys == plan.standbys


def test_standby_copies_are_in_other_racks() -> None:
    hosts = [host(number, rack="ab"[number % 2]) for number in range(6)]
    plan, _ = settled(12, hosts, {}, NOTHING, 2)
    rack = {each.location: each.rack for each in hosts}
    assert all(rack[plan.homes[group]] != rack[at] for group, places in plan.standbys.items() for at in places)


def test_two_executors_of_one_machine_are_one_place_for_copies() -> None:
    hosts = [host(0, machine="m"), host(1, machine="m"), host(2, machine="n")]
    plan, _ = settled(9, hosts, {}, NOTHING, 2)
    for group, places in plan.standbys.items():
        machines = {"m" if at in ("at-0", "at-1") else "n" for at in (plan.homes[group], *places)}
        assert machines == {"m", "n"}


def test_without_hosts_everything_waits() -> None:
    assert assign(3, [], {}, NOTHING).waiting == {0, 1, 2}


@given(st.integers(1, 64), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 64), st.data())
def test_tasks_have_each_touched_group_once_where_its_home_is(
    groups: int, cores: list[int], wanted: int, data: st.DataObject
) -> None:
    executors = {f"at-{n}": [(f"executor-{n}", count)] for n, count in enumerate(cores)}
    homes = {group: data.draw(st.sampled_from(sorted(executors))) for group in range(groups)}
    touched = data.draw(st.sets(st.integers(0, groups - 1), min_size=1))
    tasks = tasks_of(homes, executors, touched, wanted)
    assert sorted(group for task in tasks for group in task.groups) == sorted(touched)
    per_place = Counter(task.location for task in tasks)
    for task in tasks:
        assert task.groups
        assert {homes[group] for group in task.groups} == {task.location}
        assert task.executor == executors[task.location][0][0]
        assert per_place[task.location] <= executors[task.location][0][1] or wanted > sum(cores)
    assert len(tasks) <= max(len(per_place), wanted + len(per_place))
