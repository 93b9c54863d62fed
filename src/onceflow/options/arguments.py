"""Arguments of what users call: an unknown one is refused with the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from onceflow.errors import OptionError
from onceflow.options.column_names import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


def known_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same function, which refuses keyword arguments that it does not have with an OptionError.

    Python's own TypeError names only the unknown one, and ``Topic=`` and ``topics=`` look right at first sight.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    names = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    of_a_class = names[:1] == ["self"]
    names = names[of_a_class:]
    known = frozenset(names)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() - known:
            # Methods of Flow are defined in its base classes, of which users need not know.
            owner = type(args[0]).__name__ if of_a_class else "onceflow"
            called = owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"
            raise OptionError(
                f"{called} has no argument {name!r}",
                flow=None if owner == called or not of_a_class else getattr(args[0], "name", None),
                next_step=f"{did_you_mean(name, names)}Its arguments are {', '.join(names)}",
            )
        return function(*args, **kwargs)

    return checked


def with_known_arguments(cls: _C) -> _C:
    """The same class with a constructor that is like `known_arguments`. For dataclasses, whose constructor is made."""
    cls.__init__ = known_arguments(cls.__init__)  # type: ignore[misc]
    return cls
