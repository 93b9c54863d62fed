"""docs/architecture.md is true of the code: its list of packages is theirs, and what it names exists."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import onceflow

ROOT = Path(__file__).parents[2]
SOURCES = Path(onceflow.__file__).parent
PAGE = ROOT / "docs" / "architecture.md"
#: Around the product.
TOOLS = ("broker", "cli", "templates", "testing")


@cache
def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |^\[\w+\]: )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_list_of_packages_is_that_of_their_docstrings() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "package_list.py"))
    assert PAGE.read_text() == script["page"](PAGE.read_text()), "run scripts/package_list.py"
    assert len(script["rows"]()) > 30
    assert all(all(row) for row in script["rows"]())


text_of = cache(Path.read_text)


@pytest.fixture(scope="module", autouse=True)
def _texts_are_not_kept() -> Iterator[None]:
    yield
    text_of.cache_clear()


def defined(path: Path, name: str) -> bool:
    """Whether a module defines a function, or a method as ``Class.method``."""
    if not all(re.search(rf"^ *(class|def) {part}\b", text_of(path), re.MULTILINE) for part in name.split(".")):
        return False  # most modules need not be parsed
    body: list[ast.stmt] = ast.parse(text_of(path)).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_the_walk_of_a_record_names_functions_that_exist() -> None:
    walk = section("The walk of a record from `Flow.write` to EndTxn")
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| `([\w.]+)` \|", walk, re.MULTILINE)
    assert len(rows) > 30
    assert rows[0] == ("flow.py", "Flow.write")
    assert ("client/transactions.py", "Transactions.end") in rows
    missing = [(path, name) for path, name in rows if not defined(SOURCES / path, name)]
    assert not missing


def test_the_steps_of_a_batch_name_functions_that_exist() -> None:
    cells = re.findall(r"^\| `\w+` \| (`[^|]+`) \|", section("One batch"), re.MULTILINE)
    assert len(cells) == 8
    files = [path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] not in TOOLS]
    for name in re.findall(r"`([\w.]+)`", " ".join(cells)):
        assert any(defined(path, name) for path in files), name
