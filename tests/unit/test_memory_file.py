"""A file that two processes share: what one puts there the other one reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow.spark import memory_file
from onceflow.spark.memory_file import MemoryFile


@pytest.fixture(params=["room in memory", "no room in memory", "names"])
def file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFile]:
    if request.param == "no room in memory":
        monkeypatch.setattr(memory_file, "_FREE_MIN", 1 << 62)
    if request.param == "names":
        monkeypatch.setattr(memory_file.sys, "platform", "darwin")
    made = MemoryFile()
    yield made
    made.close()


def other_process(code: str, path: str) -> str:
    return subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True).stdout


def test_another_process_reads_what_is_put_there(file: MemoryFile) -> None:
    for content in (b"first and long", b"second", b""):
        file.put(pa.py_buffer(content))
        assert other_process("import sys; print(open(sys.argv[1]).read(), end='')", file.path) == content.decode()


def test_what_another_process_appends_is_taken_once(file: MemoryFile) -> None:
    for content in ("first and long", "second"):
        other_process(f"import sys; open(sys.argv[1], 'a').write({content!r})", file.path)
        assert file.take().to_pybytes() == content.encode()
        assert file.take().to_pybytes() == b""
    file.put(pa.py_buffer(b"x"))
    file.clear()
    assert file.take().to_pybytes() == b""


def test_nothing_is_left(file: MemoryFile) -> None:
    path = Path(file.path)
    file.put(pa.py_buffer(b"x"))
    file.close()
    assert not path.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a file needs a name")
def test_a_killed_process_leaves_nothing() -> None:
    code = (
        "import os, signal, pyarrow as pa\nfrom onceflow.spark.memory_file import MemoryFile\nfile = MemoryFile()\n"
        "file.put(pa.py_buffer(b'x'))\nprint(os.readlink(file.path), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "(deleted)" in said
    assert not os.path.exists(said.split()[0])
