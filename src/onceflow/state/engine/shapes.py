"""Checks whether a stored value has the fields that the processor expects now."""

from __future__ import annotations

from typing import Any

from onceflow.state.api.processor import ColumnProcessor, Processor, Repacked
from onceflow.state.api.serdes import Struct
from onceflow.state.api.time_joins import TimeJoin
from onceflow.state.windows.aggregates import described
from onceflow.state.windows.processor import WindowProcessor

SHAPE_ERRORS = (KeyError, AttributeError, TypeError, IndexError)
"""What Python raises if a value does not have the fields or the type that code expects."""


STATE_COLUMNS = frozenset({"key", "exists", "deleted"})
"""The columns of the states of a column processor besides its ``state_fields``."""


def lacks(stored: Any, new: Any) -> bool:
    """Whether a stored value lacks a field that a new value of the same processor has, or is of another type.

    Numbers, text, lists and other values without fields count as the same type, because a processor may store
    different ones depending on the records. None says nothing about the fields.
    """
    if stored is None or new is None:
        return False
    if isinstance(new, dict) and isinstance(stored, dict):
        return any(name not in stored or lacks(stored[name], value) for name, value in new.items())
    if _is_plain(new) and _is_plain(stored):
        return False
    if type(new) is not type(stored):
        return True
    return lacks(vars(stored), vars(new)) if hasattr(new, "__dict__") else False


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, bytes, list, tuple, set, frozenset))


def declared_fields(processor: Processor | ColumnProcessor, *, aggregates: bool = True) -> str | None:
    """The fields, aggregates and windows that a processor declares for its state, as text; None if it declares none.

    Args:
        aggregates: False: without them, as the earlier versions have noted it.
    """
    if isinstance(processor, TimeJoin | Repacked):
        return processor.kept
    if isinstance(processor, ColumnProcessor):
        if processor.state_fields is None:
            return None
        reserved = STATE_COLUMNS & processor.state_fields.keys()
        if reserved:
            raise ValueError(
                f"fields cannot be named {', '.join(sorted(reserved))}: the table of states has such columns"
            )
        return Struct(processor.state_fields).name
    fields = [processor.state.name] if isinstance(processor.state, Struct) else []
    if isinstance(processor, WindowProcessor):
        if aggregates and processor.aggregates:
            fields.append(described(processor.aggregates))
        fields.append(repr(processor.window))
    return " of ".join(fields) or None
