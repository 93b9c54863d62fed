"""Writes the tables of arguments into docs/reference.md, from signatures and docstrings.

In a section ``### Flow.read`` of the page, everything from the table on is written here. What is before is not touched.
Run it with ``python scripts/reference.py`` when an argument or its text under ``Args:`` has changed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "onceflow"
PAGE = ROOT / "docs" / "reference.md"
HEAD = "| Argument | Default | Meaning |\n|---|---|---|\n"
WIDTH = 140
Definition = ast.ClassDef | ast.FunctionDef


class Argument(NamedTuple):
    name: str
    default: str
    """As in the source; empty: there is none."""
    meaning: str
    """In Markdown."""


# ---- what the sources say --------------------------------------------------------------------------------


@cache
def source(module: str) -> str:
    path = ROOT / "src" / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


@cache
def homes() -> dict[str, str]:
    """The module of each public name."""
    (found,) = (_assigned(node)["_HOMES"] for node in tree("onceflow").body if "_HOMES" in _assigned(node))
    return dict(ast.literal_eval(found))


def definition(name: str) -> Definition:
    """What ``Flow`` or ``Flow.read`` is."""
    body: list[ast.stmt] = tree(homes()[name.partition(".")[0]]).body
    for part in name.split("."):
        (found,) = (node for node in body if isinstance(node, Definition) and node.name == part)
        body = found.body
    return found


def methods() -> list[str]:
    """The public methods of Flow that take arguments."""
    found = [node for node in definition("Flow").body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return [f"Flow.{node.name}" for node in found if _parameters(node)]


def arguments(name: str) -> list[Argument]:
    """The arguments of a public function, method or class, in the order of its signature."""
    module, node = homes()[name.partition(".")[0]], definition(name)
    meanings = _meanings(ast.get_docstring(node) or "", name)
    parameters = _parameters(node)
    if sorted(meanings) != sorted(parameters):
        raise ValueError(f"{name} has the arguments {[*parameters]}, and its docstring explains {[*meanings]}")
    return [Argument(each, _default(value, name, module), meanings[each]) for each, value in parameters.items()]


def _parameters(node: Definition) -> dict[str, ast.expr | None]:
    """Each parameter with its default."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not made:  # a dataclass
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return {each.target.id: each.value for each in fields if isinstance(each.target, ast.Name)}
        (node,) = made
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    without: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    found: dict[str, ast.expr | None] = {
        each.arg: value for each, value in zip(positional, [*without, *given.defaults], strict=True)
    }
    found.pop("self", None)
    if given.vararg is not None:
        found[given.vararg.arg] = None
    found.update({each.arg: value for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)})
    if given.kwarg is not None:
        found[given.kwarg.arg] = None
    return found


def _default(value: ast.expr | None, name: str, module: str) -> str:
    """A default as in the source; a constant has its value in place of its name."""
    if value is None:
        return ""
    if not isinstance(value, ast.Name):
        return ast.get_source_segment(source(module), value) or ""
    for node in tree(module).body:
        if isinstance(node, ast.ImportFrom) and value.id in {each.name for each in node.names}:
            return _default(value, name, node.module or "")
        if value.id in _assigned(node):
            return _default(_assigned(node)[value.id], name, module)
    return f"{name}.{value.id}"  # an attribute of the class


def _assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """The names that a statement binds, each with its value."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return {name: value}
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            pairs = zip(names, values, strict=True)
            return {each.id: value for each, value in pairs if isinstance(each, ast.Name)}
    return {}


def _meanings(docstring: str, name: str) -> dict[str, str]:
    """What the section ``Args:`` says of each argument."""
    section = re.search(r"^Args:\n((?:    .*\n?)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    return {each: markdown(" ".join(text.split()), name) for names, text in entries for each in names.split(", ")}


# ---- the page --------------------------------------------------------------------------------------------


def markdown(text: str, name: str) -> str:
    """Text of the docstring of ``name``."""

    def full(found: re.Match[str]) -> str:
        """Methods of Flow call each other by their short names."""
        return f"`Flow.{found[1]}`" if f"Flow.{found[1]}" in methods() else found[0]

    text = text.replace("``", "`")
    text = re.sub(r"`docs/(([\w-]+)\.md)`", lambda found: f"[{found[2].capitalize()}]({found[1]})", text)
    if name.startswith("Flow"):
        text = re.sub(r"`(\w+)`", full, text)
    text = re.sub(r"`onceflow\.(\w+)`", r"`\1`", text)
    return re.sub(r"(?<![`\w])[A-Z]\w+Error\b", r"`\g<0>`", text)


def table(name: str) -> str:
    """The table of arguments, and below it what does not fit into its rows."""
    rows, rest = [], []
    for argument in arguments(name):
        first, *others = re.split(r"(?<=\.) (?=[A-Z`])", argument.meaning)
        short = first if first.endswith("...") else first.removesuffix(".")
        row = _row(argument, argument.meaning if others else short)
        if len(row) > WIDTH and others:
            row = _row(argument, short)
            rest.append(_item(f"`{argument.name}`: {' '.join(others)}"))
        if len(row) > WIDTH:
            raise ValueError(f"The first sentence about {argument.name} of {name} is too long for a row of a table")
        rows.append(row)
    return HEAD + "".join(f"{row}\n" for row in rows) + ("\n" + "".join(rest) if rest else "")


def _row(argument: Argument, meaning: str) -> str:
    default = f" `{argument.default}`" if argument.default else ""
    return f"| `{argument.name}` |{default} | {meaning.replace('|', chr(92) + '|')} |"


def _item(text: str) -> str:
    """An item of a list, in lines that break neither code nor links."""
    kept = re.sub(r"`[^`]+`|\[[^\]]+\]", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(f"- {kept}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def sections(text: str) -> list[str]:
    """What the page explains."""
    found = re.findall(r"^### ([\w.]+)$", text, re.MULTILINE)
    return [name for name in found if name.partition(".")[0] in homes()]


def page(text: str) -> str:
    """The page with the tables as they are now."""
    for name in sections(text):
        before, heading, rest = text.partition(f"\n### {name}\n")
        end = re.search(r"^##", rest, re.MULTILINE)
        after = rest[end.start() :] if end else ""
        intro = rest.removesuffix(after).partition(HEAD)[0].strip()
        parts = [part.strip("\n") for part in (intro, table(name), after)]
        text = before + heading + "\n" + "\n\n".join(filter(None, parts)) + "\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
