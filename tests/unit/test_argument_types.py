"""Arguments of another type: each public call refuses them with an OptionError that names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onceflow
from onceflow.errors import OptionError
from onceflow.options.arguments import checked_arguments

ODD = {"str": ["a", 7, b"t", None, 1.5, Path("t")], "bool": ["no", "", 0, 1, None, []], "DataFrame": ["t", 7, None]}
#: Calls whose objects or places are not made here.
PUBLIC = {
    **{f"Flow.{name}": getattr(onceflow.Flow, name) for name in dir(onceflow.Flow) if not name.startswith("_")},
    **{f"{name}()": getattr(onceflow, name) for name in onceflow.__all__ if inspect.isclass(getattr(onceflow, name))},
    **{name: getattr(onceflow, name) for name in onceflow.__all__ if inspect.isfunction(getattr(onceflow, name))},
}


def cases() -> Iterator[Any]:
    for called, found in PUBLIC.items():
        function = found.__init__ if inspect.isclass(found) else found
        if not hasattr(function, "__wrapped__"):
            continue
        for name, each in inspect.signature(function).parameters.items():
            parts = str(each.annotation).split(" | ")
            if parts == ["str"] and each.default is not each.empty:
                parts.append("None")  # such an option has a check of its own
            for odd in ODD.get(parts[0], []) if set(parts) <= {parts[0], "None"} else []:
                odd = [odd] if odd == "a" else odd
                if odd is not None or "None" not in parts:
                    yield pytest.param(found, name, odd, id=f"{called} {name}={odd!r}")


@pytest.mark.parametrize("called, name, odd", [*cases()])
def test_another_type_is_refused(called: Any, name: str, odd: Any) -> None:
    function = called.__init__ if inspect.isclass(called) else called
    self = (SimpleNamespace(name="f"),) if "self" in inspect.signature(function).parameters else ()
    with pytest.raises(OptionError, match=rf"{name}\b.* is of type {type(odd).__name__}") as raised:
        function(*self, **{name: odd})
    assert raised.value.next_step.startswith("give ")


def test_the_kinds_of_calls_are_there() -> None:
    ids = {str(each.id).split(" ")[0] for each in cases()}
    assert {"Flow.read", "Flow.write", "Flow.process", "Flow()", "PostgresSink()", "Table()", "serve"} <= ids


def test_what_is_right_passes() -> None:
    @checked_arguments
    def take(name: str, path: str | Path | None = None, *, on: bool = False, other: int = 0) -> Any:
        return name, path, on, other

    assert take("a", Path("p"), on=np.True_, other="x") == ("a", Path("p"), True, "x")  # type: ignore[arg-type]
    assert take("a", None) == ("a", None, False, 0)
    assert take(name="b", path="p") == ("b", "p", False, 0)
    with pytest.raises(OptionError, match="path is of type int"):
        take("a", 7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on='no' is of type str") as raised:
        take("a", on="no")  # type: ignore[arg-type]
    assert raised.value.next_step == "give True or False"


def test_what_may_be_a_secret_is_not_shown() -> None:
    with pytest.raises(OptionError) as raised:
        onceflow.PostgresSink(b"postgresql://me:secret@host/db", "t")  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)
