"""Writes the list of packages into docs/architecture.md, from the packages' docstrings.

Run it with ``python scripts/package_list.py`` when a docstring has changed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "onceflow"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by scripts/package_list.py -->\n", "<!-- end -->\n"
#: Around the product. They may import anything, and nothing of the product imports them.
TOOLS = ("broker", "cli", "templates", "testing")


def rows() -> list[tuple[str, str, str]]:
    """The packages of the product: each with what it owns, and the file to start with."""
    found = []
    for file in sorted(SOURCES.rglob("__init__.py")):
        package = file.parent.relative_to(SOURCES)
        if file.parent == SOURCES or package.parts[0] in TOOLS:
            continue
        text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
        owns, _, rest = text.partition(" It may import ")
        start = re.search(r"Start reading at ``([\w/]+\.py)``", rest)
        found.append((package.as_posix(), owns.replace("``", "`"), start[1] if start else ""))
    return found


def listed() -> str:
    """The rows as a list."""
    lines = []
    for package, owns, start in rows():
        lines += textwrap.wrap(f"- `{package}`: {owns} Start with `{start}`.", 140, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + listed() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
