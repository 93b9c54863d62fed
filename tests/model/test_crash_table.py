"""The crash table of docs/internals.md is what the model does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_has_the_table() -> None:
    sys.path.insert(0, str(HERE))
    try:
        crash_table = importlib.import_module("crash_table")
    finally:
        sys.path.remove(str(HERE))
    assert crash_table.table(1) == crash_table.table(2)
    assert crash_table.table(2) in (HERE.parents[1] / "docs" / "internals.md").read_text()
