"""Which modules tasks are given, and in which form."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import shipping


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program's folder, first in ``sys.path``; what is imported from it is forgotten with the test."""
    before = set(sys.modules)
    folder = tmp_path / "program"
    files = {
        "of_one_file.py": "NAME = 'one file'",
        "never_loaded.py": "",
        "of_a_package/__init__.py": "",
        "of_a_package/inner/deep.py": "NAME = 'deep'",
        "of_a_package/rates.json": "{}",
        "of_a_package/model.bin": "x" * 2_000_000,
        "of_a_package/__pycache__/x.py": "",
        "of_a_package/.venv/x.py": "",
        "of_compiled_code/__init__.py": "",
        "of_compiled_code/inner/fast.so": "",
        "of_a_namespace/part/code.py": "NAME = 'part'",
        "of_a_namespace/part/other.py": "",
        "of_a_namespace/package/__init__.py": "",
        "of_a_namespace/package/other.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # Without the other folders of a program: the one that the tests were started in, and those of other tests.
    others = {*shipping.program_folders(), ""} - {str(Path(shipping.__file__).parents[1])}
    monkeypatch.setattr(
        sys, "path", [str(folder), *(entry for entry in sys.path if os.path.abspath(entry) not in others)]
    )
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


SENT = {
    "of_one_file.py",
    "of_a_package/__init__.py",
    "of_a_package/inner/deep.py",
    "of_a_package/rates.json",
    "of_a_namespace/part/code.py",
    "of_a_namespace/package/__init__.py",
    "of_a_namespace/package/other.py",
}


def load() -> None:
    for name in (
        "of_one_file",
        "of_a_package",
        "of_compiled_code",
        "of_a_namespace.part.code",
        "of_a_namespace.package",
    ):
        importlib.import_module(name)


def test_folders_in_front_of_the_standard_library(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_workers, appended = tmp_path / "for-workers", tmp_path / "appended"
    for folder in (for_workers, appended):
        folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(for_workers))
    library = sysconfig.get_path("stdlib")
    path = ["", str(program), str(for_workers), str(tmp_path / "absent"), "/some.zip", library, str(appended)]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.chdir(tmp_path)
    assert shipping.program_folders() == [str(tmp_path), str(program)]


def test_what_is_loaded_goes_into_the_archive(program: Path, tmp_path: Path) -> None:
    load()
    files = shipping.loaded_files([str(program)])
    assert set(files) == SENT
    archive = tmp_path / "modules.zip"
    shipping.write_archive(archive, {name: file.read_bytes() for name, file in files.items()})
    code = "import of_one_file, of_a_package.inner.deep as d, of_a_namespace.part.code as p, pkgutil\n"
    code += "print(of_one_file.NAME, d.NAME, p.NAME, pkgutil.get_data('of_a_package', 'rates.json'))"
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "one file deep part b'{}'\n"


class Context:
    """A SparkContext as far as it is needed."""

    def __init__(self, master: str) -> None:
        self.master = master
        self.environment: dict[str, str] = {}
        self.files: list[str] = []

    def addPyFile(self, path: str) -> None:
        self.files.append(path)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Context], None]:
    monkeypatch.setattr(shipping.SparkFiles, "getRootDirectory", lambda: str(tmp_path))

    def share(context: Context) -> None:
        spark: Any = SimpleNamespace(sparkContext=context)
        shipping.share_modules(spark)

    return share


def test_workers_on_this_machine_look_into_the_folders(program: Path, share: Callable[[Context], None]) -> None:
    context = Context("local[2]")
    context.environment["PYTHONPATH"] = "/set/by/the/user"
    for _ in range(2):
        share(context)
        assert context.environment["PYTHONPATH"].split(os.pathsep)[:2] == ["/set/by/the/user", str(program)]
        assert context.environment["PYTHONPATH"].split(os.pathsep).count(str(program)) == 1
    assert not context.files


def test_executors_get_an_archive_once(program: Path, share: Callable[[Context], None]) -> None:
    context = Context("spark://host:7077")
    share(context)
    assert not context.files, "nothing is loaded, nothing is sent"
    load()
    share(context)
    share(context)
    assert len(context.files) == 1
    importlib.import_module("never_loaded")
    share(context)
    assert len(set(context.files)) == 2
    assert not context.environment
    share(other := Context("spark://host:7077"))
    assert len(other.files) == 1, "another application has not got it"


def test_too_much_is_not_sent(
    program: Path, share: Callable[[Context], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    monkeypatch.setattr(shipping, "_ARCHIVE_BYTES_MAX", 10)
    share(context := Context("spark://host:7077"))
    assert not context.files
    assert "too large to be sent to the executors (7 files" in caplog.text


def test_a_file_that_cannot_be_read(program: Path, share: Callable[[Context], None]) -> None:
    load()
    (program / "of_one_file.py").unlink()
    with pytest.raises(EnvironmentUnusableError, match="cannot be packed") as caught:
        share(Context("spark://host:7077"))
    assert "of_one_file.py" in caught.value.detail
