"""Finds the processor that a user names on the command line: ``module:Class``, or ``path.py:object``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from onceflow.errors import OptionError
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.engine.choice import makes_calls
from onceflow.user_code import cut, in_words, innermost, place

_FORMS = "give module:Class, module:object or path.py:object; an object is a processor, or a function that returns one"
_MAX_TEXT = 300


def load(text: str) -> Processor | ColumnProcessor:
    """The processor that a text names. The code of its module runs, as with ``import``.

    Raises:
        OptionError: there is no such module or object, its code raises, or it is no processor that can be replayed.
    """
    where, separator, name = text.rpartition(":")
    if not (separator and where and name):
        raise OptionError(f"--replay {text!r} names no processor", next_step=_FORMS)
    module = _module_of(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, _processors_in(module), n=1) or _processors_in(module)[:5]
            there = f"; it has {', '.join(close)}" if close else "; it has no processor"
            raise OptionError(f"--replay {text}: {where} has no {name}{there}", next_step=_FORMS)
        found = getattr(found, part)
    return _usable(_made(found, text), text)


def _module_of(where: str) -> ModuleType:
    is_file = where.endswith(".py") or "/" in where
    path = Path(where)
    if is_file and not path.is_file():
        raise OptionError(f"--replay: there is no file {where}", next_step=_FORMS)
    # As `python path.py` and `python -m module` do, so that a service finds the modules beside it.
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _loaded_from(path) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as missing:
        if not is_file and missing.name is not None and f"{where}.".startswith(f"{missing.name}."):
            raise OptionError(
                f"--replay: there is no module {missing.name}",
                detail=f"searched in {Path.cwd()} and where this Python finds its packages: {sys.executable}",
                next_step=_FORMS,
            ) from missing
        raise _raised(f"--replay: importing {where} failed", missing) from missing
    except (Exception, SystemExit) as error:
        raise _raised(f"--replay: importing {where} failed", error) from error


def _loaded_from(path: Path) -> ModuleType:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path.resolve()):
            return known
        name = f"{name}_of_replay"  # others need the module that has the name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"--replay: {path} is not a Python file", next_step=_FORMS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look up their module by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _made(found: Any, text: str) -> Any:
    """The object itself, or what a class or function returns without arguments."""
    if isinstance(found, (Processor, ColumnProcessor)) or not callable(found):
        return found
    if inspect.isclass(found) and not issubclass(found, (Processor, ColumnProcessor)):
        raise OptionError(f"--replay {text}: the class is no onceflow.Processor or ColumnProcessor", next_step=_FORMS)
    try:
        missing = [
            parameter.name
            for parameter in inspect.signature(found).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        missing = []
    if missing:
        raise OptionError(
            f"--replay {text} needs arguments: {', '.join(missing)}",
            next_step="write a function without arguments that returns the processor, or a module variable that holds "
            "it, and name that",
        )
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise _raised(f"--replay: calling {text} failed", error) from error


def _usable(made: Any, text: str) -> Processor | ColumnProcessor:
    if not isinstance(made, (Processor, ColumnProcessor)):
        raise OptionError(f"--replay {text} is {cut(repr(made), 80)}, and no processor", next_step=_FORMS)
    if type(made).process in (Processor.process, ColumnProcessor.process):
        raise OptionError(f"--replay {text} does not define process()", next_step=_FORMS)
    if isinstance(made, Deduplication):
        raise OptionError(
            f"--replay {text} is a de-duplication, which is not replayed",
            next_step="compare its records by their ids: --id",
        )
    if makes_calls(made):
        raise OptionError(
            f"--replay {text} calls other services, and a replay would call them again",
            next_step="name a processor whose calls are replaced by answers that are known, or compare by ids: --id",
        )
    return made


def _processors_in(module: ModuleType) -> list[str]:
    kinds = (Processor, ColumnProcessor)
    return [
        name
        for name, each in vars(module).items()
        if isinstance(each, kinds) or (inspect.isclass(each) and issubclass(each, kinds) and each not in kinds)
    ]


def _raised(what: str, error: BaseException) -> OptionError:
    """The error for code of the user that raises, with the line that raised."""
    frame = innermost(traceback.extract_tb(error.__traceback__))
    said = in_words(error, _MAX_TEXT)
    return OptionError(
        f"{what}: {said}" + ("" if frame is None else f" (raised in {place(frame)})"),
        next_step="correct the code, or name another file. What starts a service belongs under "
        "`if __name__ == '__main__':`",
    )
