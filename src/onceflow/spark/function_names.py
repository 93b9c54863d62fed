"""The names of onceflow's functions in query plans: by them a plan shows what a function is."""

from __future__ import annotations

# Prefix of the name of a process step.
_STEP_NAME = "onceflow_state_"
# Prefix of the name of a join with a table.
_JOIN_NAME = "onceflow_join_"
# Prefix of all of onceflow's own functions. They are process steps, or make one row from each row.
_OUR_NAMES = "onceflow_"
# Prefix of the name of a function of ``Flow.map``.
_MAP_NAME = "onceflow_map_"
# They contain functions of the user's, so they are none of onceflow's own.
_CALLS_NAME, _CALLS_WITH_DEAD_LETTERS = "calls_", "calls_with_dead_letters_"


def step_name(table: str) -> str:
    """The name of a process step's function."""
    return _STEP_NAME + table


def is_step(name: str) -> bool:
    """Whether a function is a process step."""
    return name.startswith(_STEP_NAME)


def table_of_step(name: str) -> str | None:
    """The table of a process step, by the name of its function; None: it is no process step."""
    return name.removeprefix(_STEP_NAME) if is_step(name) else None


def join_name(topic: str) -> str:
    """The name of the function that joins rows with a table."""
    return _JOIN_NAME + topic


def is_join(name: str) -> bool:
    """Whether a function joins rows with a table. It contains the user's serdes."""
    return name.startswith(_JOIN_NAME)


def calls_name(function: str, *, dead_letters: bool) -> str:
    """The name of the function that calls another service for each row.

    Args:
        dead_letters: whether some of its rows are dead letters.
    """
    return (_CALLS_WITH_DEAD_LETTERS if dead_letters else _CALLS_NAME) + function


def is_calls(name: str) -> bool:
    """Whether a function calls another service for each row."""
    return name.startswith(_CALLS_NAME)


def has_dead_letters(name: str) -> bool:
    """Whether some of the rows of a function are dead letters."""
    return name.startswith(_CALLS_WITH_DEAD_LETTERS)


def map_name(number: int, function: str) -> str:
    """The name of a function of ``Flow.map``.

    Args:
        number: of the function in its flow. Two functions may have the same name.
    """
    return f"{_MAP_NAME}{number}_{function}"


def is_map(name: str) -> bool:
    """Whether a function is from ``Flow.map``. It contains a function of the user's."""
    return name.startswith(_MAP_NAME)


def function_of_map(name: str) -> str:
    """The user's function, from the name that `map_name` has made; any other name is returned as it is."""
    return name.removeprefix(_MAP_NAME).partition("_")[2] if is_map(name) else name


def is_ours(name: str) -> bool:
    """Whether a Python function is onceflow's own. Those of ``Flow.map`` are the user's."""
    return name.startswith(_OUR_NAMES) and not is_map(name)
