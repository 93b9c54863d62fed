"""A folder for hosts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Not pytest's: an executor unpacks 300 MB, and the address of a UNIX socket has to be short."""
    made = Path(tempfile.mkdtemp(prefix="hosts-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)
