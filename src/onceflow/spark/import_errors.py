"""Finds out from the errors of tasks what they cannot import."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import jvm

_IMPORT = re.compile(r"(?:ModuleNotFoundError|ImportError): .*")
_MODULE = re.compile(r"No module named '([^']+)'|cannot import name '[^']+' from (?:.*module )?'([^']+)'")


def cannot_import(problem: BaseException) -> EnvironmentUnusableError | None:
    """The error to raise when tasks have failed at an import; None when they have failed for another reason."""
    return import_error(jvm.first_line(problem))


def import_error(line: str, who: str = "") -> EnvironmentUnusableError | None:
    """The error for a line of a worker's traceback.

    Args:
        who: what needs the module, if it is known, for example ``the processor Balance``.
    """
    if not _IMPORT.match(line):
        return None
    found = _MODULE.search(line)
    module = "" if found is None else found[1] or found[2]
    if module.partition(".")[0] == "onceflow":
        next_step = "install onceflow, in the driver's version, in the Python that runs tasks (spark.pyspark.python)"
    elif (library := _library_of(module)) is not None:
        next_step = f"install {library} in the Python that runs tasks (spark.pyspark.python): pip install {library}"
    else:
        next_step = (
            "put the module beside the script that is started, or install it where tasks run: see "
            '"Packaging your code" in docs/deploy.md'
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    what = f"the module {module!r}" if module else "a module"
    return EnvironmentUnusableError(
        f"Tasks cannot import {what}{f', which {who} needs' if who else ''}",
        detail=line + (f"; the driver has it from {file}" if file else ""),
        next_step=next_step,
    )


def _library_of(module: str) -> str | None:
    """What brings a module, by the name that pip knows; None: it is not installed here, so it may be the user's own."""
    top = module.partition(".")[0]
    found = importlib.metadata.packages_distributions().get(top)
    return found[0] if found else None
