"""Breadth-first search over the states of a model: all of them, or a clear failure.

A model is an initial state, actions and invariants. States are immutable and hashable. What the search finds out:

- every invariant holds in every state that can be reached, or the shortest trace to a state where one does not;
- with no further fault, every run from every reachable state ends, and ends in a final state: where only faults are
  left to happen the state is final, and the graph of the actions that are no faults has no cycle.

The second is stronger than "a final state can be reached": no schedule of the remaining steps can miss it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: What ``Violation.invariant`` says when a run cannot go on, or need not end.
ENDS = "I5"


class Action(NamedTuple):
    """One kind of step.

    Args:
        run: what may happen in a state: (what exactly, the state after it), any number of them.
        fault: whether a run may do without it; faults are bounded by the model.
        local: the step is invisible to, and independent of, every other one that can happen in the same state: either
            order ends in the same state, and no invariant can tell the difference. A fault that makes the step
            undone (the process dies) has to end in the same state before and after it. Of a state with a local step
            only that step is followed: all other orders lead to the same states later (a partial-order reduction,
            with the local step as ample set). Steps that could be repeated for ever must not be local.
    """

    name: str
    run: Callable[[Any], Iterable[tuple[str, Any]]]
    fault: bool = False
    local: bool = False


class Step(NamedTuple):
    """One line of a trace."""

    action: str
    detail: str


class Violation(NamedTuple):
    """What does not hold, and the shortest way there.

    Args:
        state: the last of the trace.
    """

    invariant: str
    what: str
    trace: tuple[Step, ...]
    state: Any


class Result(NamedTuple):
    """What a search has seen. ``violation`` is None when all of it was searched and nothing was found."""

    states: int
    transitions: int
    seconds: float
    depth: int
    violation: Violation | None
    actions: frozenset[str]


class SearchTooLargeError(Exception):
    """There are more states than were asked for: what was searched says nothing about the rest."""


def explore(
    initial: Any,
    actions: Sequence[Action],
    invariants: Mapping[str, Callable[[Any], str]],
    *,
    final: Callable[[Any], str] | None = None,
    key: Callable[[Any], Hashable] = lambda state: state,
    states_max: int = 5_000_000,
    reduce: bool = True,
) -> Result:
    """Search all states that can be reached from ``initial``.

    States are tuples without cycles: the garbage collector would only walk over them again and again, and rests.

    Args:
        invariants: what is wrong with a state, or an empty string.
        final: what is missing in a state where a run has ended, or an empty string; None: runs are not looked at.
        key: equal for states that differ in names only; the first one found stands for the others.
        reduce: whether to follow local steps alone.

    Raises:
        SearchTooLargeError: more than ``states_max`` states.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _explore(initial, actions, invariants, final, key, states_max, reduce)
    finally:
        if collects:
            gc.enable()


def _explore(
    initial: Any,
    actions: Sequence[Action],
    invariants: Mapping[str, Callable[[Any], str]],
    final: Callable[[Any], str] | None,
    key: Callable[[Any], Hashable],
    states_max: int,
    reduce: bool,
) -> Result:
    began = time.perf_counter()
    # Local steps first: where there is one, no other action is looked at.
    ordered = sorted(actions, key=lambda action: not action.local) if reduce else actions
    runs = [(action.name, action.run, action.fault, reduce and action.local) for action in ordered]
    checks = tuple(invariants.items())
    index: dict[Hashable, int] = {key(initial): 0}
    number = index.setdefault  # one look-up for states that are known and for new ones
    queue: list[Any] = [initial]
    came: list[tuple[int, str, str]] = [(-1, "", "")]
    calm: list[tuple[int, ...]] = []  # per state, where steps that are no faults lead
    taken: set[str] = set()
    transitions = depth = 0
    level_end = 1

    def result(invariant: str = "", what: str = "", at: int = -1, state: Any = None) -> Result:
        violation = Violation(invariant, what, _trace(came, at), state) if what else None
        seconds = time.perf_counter() - began
        return Result(len(queue), transitions, seconds, depth, violation, frozenset(taken))

    for name, check in checks:
        if what := check(initial):
            return result(name, what, 0, initial)
    position = 0
    while position < len(queue):
        if position == level_end:
            depth, level_end = depth + 1, len(queue)
        state = queue[position]
        queue[position] = None  # a trace needs the steps only
        targets: list[int] = []
        for name, run, fault, alone in runs:
            before = transitions
            for detail, after in run(state):
                transitions += 1
                new = len(queue)
                at = number(key(after), new)
                if at == new:
                    queue.append(after)
                    came.append((position, name, detail))
                    taken.add(name)
                    for invariant, check in checks:
                        if what := check(after):
                            depth += at >= level_end
                            return result(invariant, what, at, after)
                    if at >= states_max:
                        raise SearchTooLargeError(f"more than {states_max:,} states: nothing is proved, ask for less")
                if not fault:
                    targets.append(at)
            if alone and transitions > before:
                break
        if final is not None:
            calm.append(tuple(targets))
            if not targets and (what := final(state)):
                return result(ENDS, f"nothing can happen any more but faults, and {what}", position, state)
        position += 1
    if final is not None and (around := _cycle(calm)):
        found = result(ENDS, "a run can go round for ever without a fault", around[0])
        return found._replace(violation=_once_around(found.violation, initial, actions, key, index, around))
    return result()


def _trace(came: Sequence[tuple[int, str, str]], at: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    while at > 0:
        at, action, detail = came[at]
        steps.append(Step(action, detail))
    return tuple(reversed(steps))


def _cycle(successors: Sequence[Sequence[int]]) -> list[int]:
    """The states of a cycle, in order; empty: there is none."""
    into = [0] * len(successors)
    for targets in successors:
        for target in targets:
            into[target] += 1
    free = [at for at, count in enumerate(into) if not count]
    while free:  # take away what nothing leads to, again and again
        for target in successors[free.pop()]:
            into[target] -= 1
            if not into[target]:
                free.append(target)
    before = {target: at for at, count in enumerate(into) if count for target in successors[at]}
    if not before:
        return []
    seen: dict[int, None] = {}
    at = next(at for at in before if into[at])
    while at not in seen:  # backwards, as what is left has predecessors that are left
        seen[at] = None
        at = before[at]
    around = list(reversed(seen))
    return around[: around.index(at) + 1]


def _once_around(
    found: Violation | None,
    state: Any,
    actions: Sequence[Action],
    key: Callable[[Any], Hashable],
    index: Mapping[Hashable, int],
    around: Sequence[int],
) -> Violation:
    """The trace to a cycle, and once around it: states are not kept, so the steps are taken again."""
    if found is None:
        raise ValueError("there is no trace to the cycle")
    steps = list(found.trace)
    for step in found.trace:
        state = next(
            after
            for action in actions
            if action.name == step.action
            for detail, after in action.run(state)
            if detail == step.detail
        )
    for target in (*around[1:], around[0]):
        step, state = next(
            (Step(action.name, detail), after)
            for action in actions
            if not action.fault
            for detail, after in action.run(state)
            if index.get(key(after)) == target
        )
        steps.append(step)
    what = f"{found.what}: the last {len(around)} steps, again and again"
    return Violation(found.invariant, what, tuple(steps), state)


def readable(violation: Violation, describe: Callable[[Any], Sequence[str]]) -> str:
    """A trace as people read it: one numbered line per step, what is wrong, and the state it ends in.

    Args:
        describe: lines about a state.
    """
    width = max((len(step.action) for step in violation.trace), default=0)
    lines = [f"{number:3}  {step.action:{width}}  {step.detail}" for number, step in enumerate(violation.trace, 1)]
    lines.append(f"     {violation.invariant} does not hold: {violation.what}")
    if violation.state is not None:
        lines += [f"       {line}" for line in describe(violation.state)]
    return "\n".join(lines)
