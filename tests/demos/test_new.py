"""`onceflow new`: what it writes is a clean project, whatever it is called; names that cannot be are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import onceflow
from onceflow.cli.new import NAME_LENGTH_MAX, Source, new, requirement, source_of, write_project
from onceflow.errors import OptionError

ROOT = Path(__file__).parents[2]
FILES = [
    ".gitignore",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "src/my_orders/__init__.py",
    "src/my_orders/service.py",
    "src/my_orders/topics.py",
    "tests/test_flow.py",
    "tests/test_integration.py",
    "tests/test_service.py",
]
# Lines that fit with one name must neither be too long nor fit too well with another.
every_length = pytest.mark.parametrize("name", ["a", "my-Orders", "z" * NAME_LENGTH_MAX], ids=len)


def run(command: Sequence[str | Path], folder: Path, limit_s: float = 120, **environment: str) -> str:
    """What a command says; it must succeed."""
    answer = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project("my-Orders", tmp_path / "made")
    return tmp_path / "made"


# ---- what it writes --------------------------------------------------------------------------------------


def test_it_tells_what_it_wrote_and_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(new, ["my-Orders"], catch_exceptions=False)
    assert answer.exit_code == 0
    title, *files, last = answer.output.splitlines()
    assert title == "Project my-Orders in my-Orders:"
    assert [file.strip() for file in files] == FILES
    assert last == "Next: cd my-Orders && make test"
    there = [path for path in Path("my-Orders").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to("my-Orders")) for path in there) == FILES


def test_a_folder_of_its_own_choice(tmp_path: Path) -> None:
    (tmp_path / "an empty one").mkdir()
    answer = CliRunner().invoke(new, ["orders", "--directory", str(tmp_path / "an empty one")], catch_exceptions=False)
    assert answer.exit_code == 0
    assert answer.output.splitlines()[-1] == f"Next: cd '{tmp_path}/an empty one' && make test"
    assert (tmp_path / "an empty one" / "src" / "orders" / "service.py").is_file()


def test_no_placeholder_is_left(project: Path) -> None:
    for path in project.rglob("*"):
        if path.is_file():
            assert re.findall(r"\{\{\w+\}\}|MODULE", path.read_text()) == [], path


def test_it_asks_for_this_version_of_onceflow(project: Path) -> None:
    asked = f'dependencies = ["onceflow>={onceflow.__version__},<'
    assert asked in (project / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "version, asked",
    [
        ("0.1.0", "onceflow>=0.1.0,<0.2"),
        ("0.10.3", "onceflow>=0.10.3,<0.11"),
        ("0.2.0.dev1", "onceflow>=0.2.0.dev1,<0.3"),
        ("1.4.2", "onceflow>=1.4.2,<2"),
    ],
)
def test_other_versions_that_will_do(version: str, asked: str) -> None:
    assert requirement(version) == asked


# ---- and that it is clean --------------------------------------------------------------------------------


@pytest.mark.long
def test_its_unit_tests_pass(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not integration"]
    assert re.search(r"^=+ \d\d passed, 2 deselected in", run(command, project, PYTHONPATH="src"), re.MULTILINE)


@every_length
def test_its_code_is_formatted(name: str, tmp_path: Path) -> None:
    write_project(name, tmp_path)
    run([sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "."], tmp_path)
    rules = "A,B,C4,E,F,I,ISC,PIE,PT,RUF,UP,W"
    run([sys.executable, "-m", "ruff", "check", "--no-cache", "--select", rules, "."], tmp_path)


@pytest.mark.long
def test_its_code_is_typed(project: Path) -> None:
    # The cache is for what the project imports: without it this takes six seconds instead of one.
    cache = ROOT / ".mypy_cache" / "generated"
    # What fills it first checks all of onceflow.
    run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "src", "tests"], project, 600)


def test_its_readme_has_lines_of_a_readable_length(project: Path) -> None:
    assert max(map(len, (project / "README.md").read_text().splitlines())) <= 140


def test_its_makefile(project: Path) -> None:
    make = shutil.which("make")
    assert make
    assert ".venv/bin/python -m pytest\n" in run([make, "-n", "test"], project)
    told = run([make, "-n", "run", "PYTHON=python-of-mine", "ONCEFLOW=/a/checkout", "SERVERS=kafka:1"], project)
    assert "python-of-mine -m venv .venv\n" in told
    assert told.index('echo "setup: ') < told.index("pip install --quiet"), "it is silent for minutes"
    assert 'pip install --quiet --disable-pip-version-check "/a/checkout" -e ".[dev]"\n' in told
    assert ".venv/bin/python -m my_orders.service --bootstrap-servers kafka:1\n" in told
    targets = set(re.findall(r"^  (\w+)", run([make], project), re.MULTILINE))
    assert targets >= {"setup", "test", "unit", "run", "broker"}
    told_of = set(re.findall(r"(?:^|`)make (\w+)", (project / "README.md").read_text(), re.MULTILINE))
    assert told_of == targets - {"setup", "help"}


def default_of_onceflow(project: Path) -> str:
    """What the Makefile gives to pip, as the shell reads it."""
    (quoted,) = re.findall(r' (".*") -e "\.\[dev\]"$', run(["make", "-n", "setup"], project), re.MULTILINE)
    return run(["bash", "-c", f"printf %s {quoted}"], project)


def test_onceflow_comes_from_the_checkout_that_made_it(project: Path) -> None:
    assert default_of_onceflow(project) == str(ROOT)
    assert f"once published: {requirement(onceflow.__version__)}\n" in (project / "Makefile").read_text()


def test_or_from_where_it_was_installed_from(tmp_path: Path) -> None:
    package, wheel = tmp_path / "site-packages" / "onceflow", tmp_path / "a b#%20.whl"
    wheel.touch()
    file = {"url": wheel.as_uri(), "archive_info": {}}
    folder = {"url": tmp_path.as_uri(), "dir_info": {}}
    commit = {"url": "https://example.com/o.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    url = {"url": "https://example.com/o.whl", "archive_info": {}}
    published = requirement(onceflow.__version__)
    for told, expected in (
        (file, str(wheel)),
        (folder, str(tmp_path)),
        (commit, "onceflow @ git+https://example.com/o.git@c0ffee"),
        ({**commit, "subdirectory": "py"}, "onceflow @ git+https://example.com/o.git@c0ffee#subdirectory=py"),
        (url, "onceflow @ https://example.com/o.whl"),
    ):
        assert source_of(package, json.dumps(told)).install == expected
    assert source_of(package, None).install == published
    wheel.unlink()
    found = source_of(package, json.dumps(file))
    assert (found.install, found.gone) == (published, str(wheel))


def test_a_place_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Source("onceflow>=0.1.0,<0.2", "", gone="/tmp/onceflow.whl")
    monkeypatch.setattr("onceflow.cli.new.source", lambda: gone)
    answer = CliRunner().invoke(new, ["orders", "--directory", str(tmp_path)], catch_exceptions=False)
    assert "installed from /tmp/onceflow.whl, which is not there any more" in answer.stderr
    assert "make test ONCEFLOW=" in answer.stderr


@pytest.mark.parametrize("place", ["/a b/c", "/a$b#c", '/a"b`c', "/a\\b", "onceflow>=0.1.0,<0.2"])
def test_places_that_make_and_the_shell_could_take_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("onceflow.cli.new.source", lambda: Source(place, "from somewhere"))
    write_project("orders", tmp_path)
    assert default_of_onceflow(tmp_path) == place


def test_its_makefile_refuses_an_old_python(project: Path) -> None:
    old = project / "old-python"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 9); $2"\n')
    old.chmod(0o755)
    answer = subprocess.run(
        ["make", "setup", f"PYTHON={old}"], cwd=project, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 2
    assert "Python 3.10 or later is needed" in answer.stderr
    assert not (project / ".venv").exists()


# ---- what it refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "1st", "-orders", "orders-", "or ders", "or/ders", "..", "örders", "x" * 41])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a name for a project\n  next step: begin with a letter"):
        write_project(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, what",
    [
        ("class", "a keyword of Python"),
        ("json", "standard library"),
        ("Json", "standard library"),
        ("pyspark", "installed"),
        ("onceflow", "installed"),
        ("confluent-kafka", "installed"),
        ("tests", "installed, or that the project has"),
    ],
)
def test_names_that_are_taken(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=what) as refused:
        write_project(name, tmp_path)
    assert f"for example {name}-service" in refused.value.next_step
    assert list(tmp_path.iterdir()) == []
    write_project(f"{name}-service", tmp_path)  # so the advice is good


def test_nothing_is_overwritten(project: Path, tmp_path: Path) -> None:
    readme = project / "README.md"
    readme.write_text("mine")
    for taken in (project, readme):
        with pytest.raises(OptionError, match="exists and is not an empty folder"):
            write_project("orders", taken)
    assert readme.read_text() == "mine"
    assert not (project / "src" / "orders").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be written") as refused:
        write_project("orders", tmp_path / "file" / "orders")
    assert "NotADirectoryError" in refused.value.detail
    assert "--directory" in refused.value.next_step
