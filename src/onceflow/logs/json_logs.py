"""``JsonLogFormatter``: log lines as JSON, with the flow, batch, producer and step that they are about."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from onceflow.errors import OnceflowError, OptionError
from onceflow.logs import log_context
from onceflow.logs.log_context import JSON, TEXT, VARIABLE

log = logging.getLogger("onceflow")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class JsonLogFormatter(JsonFormatter):
    """A formatter for the handlers of Python's ``logging``: one JSON object per line.

    Fields: ``time`` (ISO 8601, UTC, milliseconds), ``level``, ``logger``, ``message``. Where they are known: ``flow``,
    ``batch``, ``producer_id``, ``producer_epoch``, ``step`` (the step of the batch that is under way), ``error``
    (``type``, ``what``, ``detail``, ``next_step``, ``stack``) and ``stack``. What was given as ``extra=`` follows.

    ::

        handler = logging.StreamHandler()
        handler.setFormatter(onceflow.JsonLogFormatter())
        logging.basicConfig(handlers=[handler])
    """

    def __init__(self) -> None:
        super().__init__(json_serializer=_strict)

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Put the fields of a line together, in their order."""
        error = _error_of(record)
        log_data["time"] = _time(record.created)
        log_data["level"] = record.levelname
        log_data["logger"] = record.name
        log_data["message"] = record.message
        log_data.update({name: value for name, value in _places(error).items() if value is not None})
        message_dict.pop("exc_info", None)
        if error is not None:
            log_data["error"] = _described(error, record.exc_info)
        if "stack_info" in message_dict:
            log_data["stack"] = message_dict.pop("stack_info")
        # `extra=` of the caller, and a dictionary in place of a message, do not replace what is there.
        more: dict[str, Any] = {}
        super().add_fields(more, record, message_dict)
        log_data.update({name: value for name, value in more.items() if name not in log_data})


def use_json() -> None:
    """Write log lines to the console as JSON from now on, also the error that ends the program.

    Handlers of the root logger and of ``onceflow`` that write to the console get another formatter. If there are none,
    there is a new one on stderr, and ``onceflow`` logs from INFO on. A ``sys.excepthook`` of the program is still
    called, after the line of the error.
    """
    ours = logging.getLogger("onceflow")
    found = [handler for logger in (logging.getLogger(), ours) for handler in logger.handlers if _is_console(handler)]
    if not found:
        found = [logging.StreamHandler()]
        logging.getLogger().addHandler(found[0])
        if ours.level == logging.NOTSET:
            ours.setLevel(logging.INFO)
    for handler in found:
        handler.setFormatter(JsonLogFormatter())
    _log_uncaught()


def use(log_format: str | None) -> bool:
    """Apply a format that was given, or that of the environment.

    Returns:
        Whether log lines are JSON now.

    Raises:
        OptionError: there is no such format.
    """
    wanted = is_wanted(log_format)
    if wanted:
        use_json()
    return wanted


def is_wanted(log_format: str | None) -> bool:
    """Whether log lines are to be JSON. Arguments and errors as of `use`."""
    chosen = log_format or os.environ.get(VARIABLE) or TEXT
    if chosen not in (TEXT, JSON):
        where = VARIABLE if log_format is None else "log_format"
        raise OptionError(f"{where} is {chosen!r}", next_step=f'give "{JSON}" or "{TEXT}"')
    return chosen == JSON


_hooks_before: list[_Hook] = []  # one, once errors are logged


def _log_uncaught() -> None:
    """At the first call: a hook that is set later stays, even if it calls this one."""
    if not _hooks_before:
        _hooks_before.append(sys.excepthook)
        sys.excepthook = _uncaught


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of the traceback that Python prints."""
    (before,) = _hooks_before
    is_logged = not issubclass(kind, KeyboardInterrupt)
    if is_logged:
        first = str(error).partition("\n")[0]
        log.critical("the program ends with an error: %s: %s", kind.__name__, first, exc_info=(kind, error, trace))
    if not is_logged or before is not sys.__excepthook__:
        before(kind, error, trace)


def _is_console(handler: logging.Handler) -> bool:
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


def _strict(value: Any, **options: Any) -> str:
    """JSON that every reader understands: NaN and infinity are none."""
    try:
        return json.dumps(value, **{**options, "allow_nan": False})
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, **options), parse_constant=str), **options)


def _time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _error_of(record: logging.LogRecord) -> BaseException | None:
    """The error that a line is about: that of ``exc_info``, or one among the arguments of the message."""
    if record.exc_info and record.exc_info[1] is not None:
        return record.exc_info[1]
    args = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
    return next((each for each in args if isinstance(each, BaseException)), None)


def _places(error: BaseException | None) -> Mapping[str, Any]:
    """Flow, batch and the like. An error may be of another flow than the one that its thread works for."""
    current = log_context.fields()
    if not isinstance(error, OnceflowError) or error.flow is None:
        return current
    own = {"flow": error.flow, "batch": error.batch}
    return {**own, **current} if current.get("flow", error.flow) == error.flow else own


def _described(error: BaseException, exc_info: Any) -> dict[str, str]:
    kind = type(error)
    module = "onceflow" if kind.__module__.startswith("onceflow.") else kind.__module__
    described = {"type": kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"}
    if isinstance(error, OnceflowError):
        fields = {"what": error.what, "topic": error.topic, "detail": error.detail, "next_step": error.next_step}
        described.update({name: text for name, text in fields.items() if text})
    else:
        described["what"] = str(error)
    if exc_info:
        described["stack"] = "".join(traceback.format_exception(*exc_info)).rstrip("\n")
    return described
