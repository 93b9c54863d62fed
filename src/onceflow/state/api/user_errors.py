"""Explains errors of user code: which serde did not accept which value, and which line of user code caused it.

The explanation is kept in attributes of the exception. The class of the exception does not change: user code that
handles a ``TypeError`` of ``state.put`` still gets a ``TypeError``. All of this runs only when something has failed.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from onceflow import user_code
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, DOUBLE, JSON, LONG, STRING
from onceflow.state.api.structs import Struct

MAX_MESSAGE = 1000
"""Maximum number of characters of a message: the text of an error in user code may contain a whole record."""

_MAX_SHOWN = 100
_MAX_REASON = 300
_TEXT, _PLACE = "onceflow_text", "onceflow_place"


class _Known(NamedTuple):
    """A serde of onceflow: its name, the types that it accepts (also in words), and what it decodes."""

    serde: Any
    name: str
    types: tuple[type, ...]
    takes: str
    decodes: str


_KNOWN = (
    _Known(BYTES, "BYTES", (bytes, bytearray, memoryview), "bytes", "bytes"),
    _Known(STRING, "STRING", (str,), "str", "text in UTF-8"),
    _Known(
        JSON,
        "JSON",
        (dict, list, tuple, str, int, float),
        "what JSON has (dict, list, str, int, float, bool)",
        "JSON",
    ),
    _Known(LONG, "LONG", (int,), "int", "a LONG"),
    _Known(DOUBLE, "DOUBLE", (float, int), "float", "a DOUBLE"),
)


# ---- what is noted on an error -----------------------------------------------------------------------


def explain(error: BaseException, text: str) -> None:
    """Note on an error what it means for the user."""
    error.__dict__[_TEXT] = user_code.cut(text, MAX_MESSAGE)  # some classes refuse new attributes


def not_decoded(error: BaseException, what: str, raw: bytes, serde: Any) -> None:
    """Note on an error that a serde could not decode a key or a value (``what``)."""
    known = _known(serde)
    if known.decodes:
        problem = f"{what} is not {known.decodes}: {_reason(error)}"
    else:
        problem = f"{what} cannot be decoded by serde {known.name}: {_reason(error, with_class=True)}"
    explain(error, f"{problem}; it is {shown(raw)}")


def not_encoded(error: BaseException, what: str, value: Any, serde: Any, role: str) -> None:
    """Note on an error that a serde did not accept a value.

    Args:
        what: the value, for example ``the key you yielded``.
        role: the attribute that declares the serde: ``key``, ``output`` or ``state``; or ``its`` for the serde of a map
            or list.
    """
    known = _known(serde)
    if isinstance(value, known.types):
        reason = _reason(error, with_class=not known.decodes)
        problem = f"{what} cannot be encoded by {role} serde {known.name}: {reason}"
    else:
        problem = f"{what} is {type(value).__name__}, {role} serde {known.name} takes {known.takes}"
    to_declare = known.serde == BYTES and role in ("key", "output", "state")
    hint = f"; declare another serde, for example {role} = STRING or JSON" if to_declare else ""
    explain(error, f"{problem}; got {_shown_value(value)}{hint}")


def handed_over(error: BaseException, method: Any, result: Any) -> None:
    """Note on an error which line of user code has yielded or returned the records that could not be used.

    Args:
        method: the method of the processor that has returned them.
        result: what the method has returned; None: nothing, because the method itself has failed.
    """
    if result is None:
        return
    if not isinstance(result, Record) and not hasattr(result, "__iter__") and not hasattr(result, "__getitem__"):
        explain(error, f"expected Records, got {type(result).__name__}: {_shown_value(result)}")
    waiting = _waiting(result)
    if waiting is None:
        returned_by(error, method)
    else:
        error.__dict__[_PLACE] = ("yielded in", waiting)


def returned_by(error: BaseException, method: Any) -> None:
    """Note on an error that the result of this method of the processor is the cause, if no user code has raised it."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or user_code.innermost(user_code.frames_of(error.__traceback__)) is not None:
        return
    name = getattr(method, "__qualname__", code.co_name).rpartition("<locals>.")[2]
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, name, lookup_line=False)
    if user_code.innermost([frame]) is not None:
        error.__dict__[_PLACE] = ("returned by", frame)


# ---- what is said of an error ------------------------------------------------------------------------


def text_of(error: BaseException) -> str:
    """What is wrong, in limited length, without the error's class."""
    text: str | None = error.__dict__.get(_TEXT)
    return user_code.cut(user_code.said(error), MAX_MESSAGE) if text is None else text


def full_text_of(error: BaseException) -> str:
    """What is wrong, in limited length, with the error's class unless the error is explained."""
    return text_of(error) if _TEXT in error.__dict__ else f"{type(error).__name__}: {text_of(error)}"


def line_of(error: BaseException) -> str:
    """Which line of user code raised the error, as text: the driver gets the error without its traceback."""
    frames = user_code.frames_of(error.__traceback__)
    raised = user_code.innermost(frames)
    how, noted = error.__dict__.get(_PLACE, ("", None))
    if raised is None and noted is None and frames and _TEXT not in error.__dict__:
        raised = frames[-1]  # no user code is involved, so this line helps the developers of onceflow
    lines = [] if raised is None else [f"raised in {user_code.place(raised)}"]
    return ", ".join(lines if noted is None else [*lines, f"{how} {user_code.place(noted)}"])


def stack_of(error: BaseException) -> str:
    """The lines of the traceback, followed by the noted line of user code, which the traceback does not contain."""
    _, noted = error.__dict__.get(_PLACE, ("", None))
    more = [] if noted is None else traceback.format_list([noted])
    return "".join([*traceback.format_tb(error.__traceback__), *more])


def shown(raw: bytes | None) -> str:
    """A key or a value as text for messages."""
    return repr(raw) if raw is None or len(raw) <= _MAX_SHOWN else f"{raw[:_MAX_SHOWN]!r}... ({len(raw)} bytes)"


# ---- inside ------------------------------------------------------------------------------------------


def _known(serde: Any) -> _Known:
    for known in _KNOWN:
        if known.serde == serde:  # equal, not identical: processors are pickled for tasks, so a serde is a copy there
            return known
    name = getattr(serde, "name", None)
    types: tuple[type, ...] = (Mapping,) if isinstance(serde, Struct) else (object,)
    return _Known(serde, name if isinstance(name, str) else type(serde).__name__, types, "a dict", "")


def _reason(error: BaseException, *, with_class: bool = False) -> str:
    text = user_code.cut(user_code.said(error), _MAX_REASON)
    return f"{type(error).__name__}: {text}" if with_class else text


def _shown_value(value: Any) -> str:
    if isinstance(value, bytes):
        return shown(value)
    try:
        return user_code.cut(repr(value), _MAX_SHOWN)
    except Exception:  # a __repr__ of the user's
        return f"<{type(value).__name__}>"


def _waiting(result: Any) -> traceback.FrameSummary | None:
    """The line at which a suspended generator waits after a yield; None if it does not wait, or is not a generator."""
    found = None
    while (frame := getattr(result, "gi_frame", None)) is not None:
        if frame.f_lasti >= 0 and (found is None or user_code.is_of_user(frame.f_code.co_filename)):
            found = traceback.FrameSummary(
                frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False
            )
        result = result.gi_yieldfrom
    return found
