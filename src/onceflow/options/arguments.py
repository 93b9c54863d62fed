"""Arguments of what users call: unknown ones, and texts, paths and flags of another type, are refused."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from onceflow.errors import OptionError
from onceflow.options.column_names import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_of(package: str, *names: str) -> Callable[[Any], bool]:
    """Whether a value is of a class with one of these names, of a package that is not imported for that."""
    return lambda value: any(
        each.__name__ in names and f"{each.__module__}.".startswith(f"{package}.") for each in type(value).__mro__
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or _is_numpy_bool(value)


_is_numpy_bool = _is_of("numpy", "bool", "bool_")


#: By annotation: whether a value may be given, and how that is called. Only arguments with no other annotations are
#: looked at: numbers and durations have checks of their own, with their bounds.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is(str), "a text"),
    "bool": (_is_flag, "True or False"),
    "Path": (_is(os.PathLike), "a path"),
    "os.PathLike[str]": (_is(os.PathLike), "a path"),
    "Mapping[str, str]": (_is(Mapping), "a dict of texts"),
    "DataFrame": (_is_of("pyspark.sql", "DataFrame"), "a DataFrame of Spark"),
    "None": (_is(type(None)), "None"),
}
_SHOWN = 20


def checked_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same function, which refuses two mistakes with an OptionError that names what was probably meant.

    - A keyword argument that it does not have. Python's own TypeError names only the unknown one, and ``Topic=`` and
      ``topics=`` look right at first sight.
    - A text, a path or a flag of another type. ``once="no"`` would count as True, and a list in place of a name would
      fail somewhere inside.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    names = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    kinds = {each.name: found for each in parameters if (found := _kinds(each))}
    of_a_class = names[:1] == ["self"]
    names = names[of_a_class:]
    known = frozenset(names)

    def refused(args: tuple[Any, ...], what: str, next_step: str) -> OptionError:
        # Methods of Flow are defined in its base classes, of which users need not know.
        owner = type(args[0]).__name__ if of_a_class else "onceflow"
        called = owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"
        flow = None if owner == called or not of_a_class else getattr(args[0], "name", None)
        return OptionError(f"{called}{what}", flow=flow, next_step=next_step)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() - known:
            meant = f"{did_you_mean(name, names)}Its arguments are {', '.join(names)}"
            raise refused(args, f" has no argument {name!r}", meant)
        for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
            wanted = kinds.get(name)
            if wanted and not any(fits(value) for fits, _ in wanted):
                words = " or ".join(dict.fromkeys(words for _, words in wanted))
                # A text in place of a flag is shown. Others may be secrets.
                is_shown = words == "True or False" and isinstance(value, str) and len(value) <= _SHOWN
                given = f"={value!r}" if is_shown else ""
                raise refused(args, f": {name}{given} is of type {type(value).__name__}", f"give {words}")
        return function(*args, **kwargs)

    return checked


def with_checked_arguments(cls: _C) -> _C:
    """As `checked_arguments`, for the constructor of a dataclass, which is made."""
    cls.__init__ = checked_arguments(cls.__init__)  # type: ignore[misc]
    return cls


def _kinds(parameter: inspect.Parameter) -> list[tuple[Callable[[Any], bool], str]]:
    """What an argument may be; empty: it is not looked at. Annotations are texts here, as all modules postpone them."""
    parts = str(parameter.annotation).split(" | ")
    if not all(part in _KINDS for part in parts):
        return []
    if parts == ["str"] and parameter.default is not inspect.Parameter.empty:
        parts.append("None")  # checks of its own know what to say of an option that is switched off
    return [_KINDS[part] for part in parts]
