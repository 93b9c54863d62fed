"""Searches that tests compare, as functions of what goes to another process and comes back."""

from __future__ import annotations

from typing import Any

from explore import Result, explore

from protocol import Config, Model, search


def everything(config: Config) -> Result:
    return search(Model(config))


def with_and_without_reduction(config: Config) -> tuple[Result, Result, set[Any]]:
    """Both results, and what the brokers go through with the one and not with the other."""
    model = Model(config)

    def states_of_brokers(reduce: bool) -> tuple[Result, set[Any]]:
        seen = set()

        def note(state: Any) -> str:
            coordinator, parts, *_ = model.key(state)
            seen.add((coordinator, parts, state.visible, state.progress.at, state.left, len(state.drivers)))
            return ""

        return explore(
            model.initial(), model.actions(), {"note": note}, final=model.final, key=model.key, reduce=reduce
        ), seen

    (reduced, few), (full, many) = states_of_brokers(True), states_of_brokers(False)
    return reduced, full, few ^ many


def with_and_without_keys(config: Config) -> tuple[int, int, set[Any]]:
    """How many states there are when those of one key count as one, how many when not, and keys of one of them only."""
    model = Model(config)

    def reached(key: Any) -> tuple[int, set[Any]]:
        seen = set()
        result = explore(
            model.initial(), model.actions(), {"note": lambda state: seen.add(model.key(state)) or ""}, key=key
        )
        return result.states, seen

    (merged, few), (apart, many) = reached(model.key), reached(lambda state: state)
    return merged, apart, few ^ many
