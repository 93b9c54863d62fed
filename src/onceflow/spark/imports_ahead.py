"""Modules that a start needs anyway are imported while Spark's JVM starts: Python only waits then.

Together these imports take more than a second. pyspark makes some of them at its first calls of the JVM.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

# pyspark.testing.utils imports pandas; Spark 4.2 asks it about every argument. IPython: pyspark asks it for the line of
# user code that has made a column.
_MODULES = ("onceflow.flow", "onceflow.spark.row_program", "pyspark.testing.utils", "IPython")


@contextlib.contextmanager
def imports_ahead() -> Iterator[None]:
    """Import them in a thread, beside the block."""
    thread = threading.Thread(target=_import, daemon=True, name="onceflow-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import() -> None:
    for name in _MODULES:
        # It may not be installed, or be broken. Whoever needs it says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
