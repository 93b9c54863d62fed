"""A processor as it is sent to tasks: its pickle, the modules that the pickle needs, and why one cannot be sent.

Tasks import this module, so it imports little itself.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pyspark import Broadcast, cloudpickle
from pyspark.cloudpickle.cloudpickle import _should_pickle_by_reference

from onceflow.errors import OptionError
from onceflow.state.api.processor import ColumnProcessor, Processor

_MAX_DEPTH = 6
_OF_PROCESSORS = (
    "a processor is pickled: create connections, locks and the like in open(), which runs in the tasks, and store them "
    "on self there"
)
_OF_FUNCTIONS = (
    "a function is pickled with the variables that it uses: create connections, locks and the like inside of it. To "
    "keep one, put a function with functools.cache into a module that tasks can import, and call it there"
)


@dataclass(frozen=True)
class Pickled:
    """What is sent to tasks.

    Args:
        what: for errors, for example ``the processor Balance``.
        names: the modules that are pickled by reference: tasks import these. Empty where they are not known.
        function: the name in a query plan, if it is a function there.
        broadcasts: broadcast variables in it. Spark sends those that the thread which starts a job has pickled since
            its last job. So who sends the bytes has to register them again (`Broadcast.__reduce__`).
    """

    what: str
    data: bytes = field(repr=False)
    names: frozenset[str] = frozenset()
    function: str = ""
    broadcasts: tuple[Broadcast[Any], ...] = field(default=(), repr=False, compare=False)

    def load(self) -> Any:
        """What a task gets, in the driver."""
        known = sys.modules[Broadcast.__module__].__dict__["_broadcastRegistry"]  # a driver has none in it
        for broadcast in self.broadcasts:
            known[broadcast.__reduce__()[1][0]] = broadcast
        return pickle.loads(self.data)


@dataclass(frozen=True)
class LoadFailure:
    """Why a pickle cannot be loaded in a task. The error itself is not sent: the driver may not have its class."""

    kind: str
    text: str


def pickled(sent: object, *, flow: str) -> Pickled:
    """The pickle of a processor, of a store class or of a function, made as Spark makes it.

    Raises:
        OptionError: it cannot be pickled. The text names the class and the attribute.
    """
    name = (sent if isinstance(sent, type | FunctionType) else type(sent)).__qualname__.rpartition("<locals>.")[2]
    with io.BytesIO() as file:
        pickler: Any = _Pickler(file)
        try:
            pickler.dump(sent)
        except Exception as error:
            raise _refusal(sent, name, error, flow) from error
        kind = "store" if isinstance(sent, type) else "processor" if _is_processor(sent) else "function"
        names, broadcasts = frozenset(pickler.names), tuple(pickler.broadcasts)
        return Pickled(f"the {kind} {name}", file.getvalue(), names, broadcasts=broadcasts)


def load_failure(data: bytes) -> LoadFailure | None:
    """Runs in a task: why it cannot load a pickle; None when it can."""
    try:
        pickle.loads(data)
    except Exception as error:
        return LoadFailure(type(error).__name__, str(error)[:1000])
    return None


class _Pickler(cloudpickle.Pickler):
    """Notes which modules are pickled by reference, and which broadcast variables are in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.broadcasts: list[Broadcast[Any]] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType | type | FunctionType):
            module: Any = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
            if isinstance(module, str) and _should_pickle_by_reference(obj):  # type: ignore[no-untyped-call]
                self.names.add(module)
        if isinstance(obj, Broadcast):
            self.broadcasts.append(obj)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _refusal(sent: object, name: str, error: Exception, flow: str) -> OptionError:
    what, why = _culprit(sent, name, "", _MAX_DEPTH) or (name, error)
    return OptionError(
        f"{what} cannot be sent to tasks",
        flow=flow,
        detail=f"{type(why).__name__}: {why}".splitlines()[0],
        next_step=_OF_PROCESSORS if isinstance(sent, type) or _is_processor(sent) else _OF_FUNCTIONS,
    )


def _is_processor(sent: object) -> bool:
    return isinstance(sent, Processor | ColumnProcessor)


def _culprit(value: Any, name: str, user: str, depth: int) -> tuple[str, Exception] | None:
    """The part of a value that cannot be pickled, and why; None if the value can be pickled.

    Args:
        user: the function that uses the value; empty if there is none.
    """
    why = _failure(value)
    if why is None:
        return None
    if depth:
        for part_name, part_user, part in _parts(value, name, user):
            found = _culprit(part, part_name, part_user, depth - 1)
            if found is not None:
                return found
    kind = "" if isinstance(value, type | FunctionType) else f" ({type(value).__qualname__})"
    return f"{name}{kind}{f', which {user} uses,' if user else ''}", why


def _failure(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


def _parts(value: Any, name: str, user: str) -> Iterator[tuple[str, str, Any]]:
    """The parts of a value that are pickled with it. Objects of other libraries are not taken apart."""
    if isinstance(value, Processor | ColumnProcessor):
        yield from ((f"{name}.{attribute}", user, part) for attribute, part in vars(value).items())
        yield name, user, type(value)
    elif isinstance(value, type):
        yield from ((f"{name}.{attribute}", user, part) for attribute, part in vars(value).items())
        yield from ((base.__qualname__, user, base) for base in value.__bases__)
    elif isinstance(value, staticmethod | classmethod):
        yield name, user, value.__func__
    elif isinstance(value, property):
        yield from ((name, user, part) for part in (value.fget, value.fset) if part is not None)
    elif isinstance(value, FunctionType):
        function = value.__qualname__ if user else name
        yield from ((variable, function, part) for variable, part in _used_by(value))
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", user, part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", user, part) for i, part in enumerate(value))


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables from outside of a function. They are pickled with it when it is pickled by value."""
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield variable, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for variable in sorted(_global_names(code) & function.__globals__.keys()):
        yield variable, function.__globals__[variable]


def _global_names(code: CodeType) -> set[str]:
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
