"""How packages depend on each other, and how long modules and functions may be: read from the source alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import onceflow

ROOT = Path(onceflow.__file__).parent
#: Around the product: they may import anything, and nothing of the product imports them.
TOOLS = ("broker", "cli", "templates", "testing")
#: Its names are loaded when they are asked for: whoever imports a module of the package imports nothing else with it.
LAZY = "onceflow"
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 1000, 50

#: Modules that any package may import.
EVERYBODYS = {"clock", "errors", "hooks", "user_code"}
#: What each package may import of ours besides these, each package by its full name. A package without a line here is
#: an error, and so is a line that allows more than is needed.
ALLOWED = {
    "admin.change": (
        "admin.records admin.status client driver.record driver.start options planning protocol "
        "state.changelog state.format state.local"
    ),
    "admin.doctor": (
        "admin.records admin.status client driver.record host options planning protocol session spark "
        "state.changelog state.local"
    ),
    "admin.records": "claim_check client object_storage protocol state.api state.changelog state.engine state.format",
    "admin.status": (
        "admin.records admin.transactions client driver.record driver.standby protocol state.format state.local "
        "state.stores"
    ),
    "admin.transactions": "admin.records client driver.record protocol",
    "admin.verify": (
        "admin.change admin.records admin.status client driver.record options protocol state state.api "
        "state.changelog state.engine state.format state.local state.stores task"
    ),
    "admin.versions": (
        "admin.change admin.records admin.transactions admin.verify client driver.record protocol "
        "state.api state.changelog state.format state.windows"
    ),
    "calls": "options",
    "claim_check": "object_storage options spark state.api",
    "client": "protocol",
    "direct": (
        "client driver.batch driver.kafka driver.record driver.start engine_query host logs messages "
        "planning protocol spark state task"
    ),
    "driver.batch": "client driver.record logs messages planning protocol spark state state.api task",
    "driver.external": (
        "client driver.batch driver.kafka driver.record external messages planning protocol spark "
        "state.api state.engine task"
    ),
    "driver.kafka": (
        "client driver.batch driver.record driver.step logs messages planning protocol spark state.engine task"
    ),
    "driver.record": "client protocol spark",
    "driver.start": (
        "arrow_types calls client driver.batch driver.external driver.kafka driver.record driver.standby driver.step "
        "engine_query external interactive logs messages options planning protocol spark state.api "
        "state.changelog state.format state.joins state.windows task"
    ),
    "driver.standby": "client driver.record host logs protocol",
    "driver.step": (
        "client driver.batch driver.record messages planning protocol spark state state.api "
        "state.changelog state.engine state.joins state.local task"
    ),
    "external": "object_storage options",
    "host": "",
    "logs": "",
    "metrics": "_version options planning state",
    "options": "",
    "planning": (
        "arrow_types calls engine_query external messages options protocol schema_registry spark state state.api "
        "state.changelog state.engine state.foreign_keys state.joins state.local state.stores state.windows task"
    ),
    "protocol": "",
    "schema_registry": "arrow_types options protocol state.format",
    "server": "_version client options protocol schema_registry state.format state.local state.stores tables",
    "service": "interactive logs metrics options planning query spark uncaught",
    "spark": "arrow_types client engine_query host interactive state state.api",
    "state": "host protocol state.api state.changelog state.joins state.local state.stores",
    "state.api": "options protocol state.format state.stores",
    "state.changelog": "client protocol",
    "state.engine": "calls options protocol state.api state.format state.stores state.windows",
    "state.foreign_keys": "state.api state.format",
    "state.joins": "host options protocol state.api state.local state.stores",
    "state.local": "host protocol state.format state.stores",
    "state.stores": "host protocol state.format",
    "state.windows": "options protocol state.api state.format",
    "tables": "client host options protocol state.api state.changelog state.format state.local state.stores",
    "task": (
        "arrow_types calls client external logs messages protocol spark state state.api state.engine "
        "state.format state.joins state.local"
    ),
}

#: Modules and functions that are longer, and why. Nothing stands here that is short enough.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


@cache
def modules() -> dict[str, ast.Module]:
    """The product's modules by name (``state.format.rows``), without the tools around it."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in TOOLS:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name or LAZY] = ast.parse(path.read_text())
    return found


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a statement. Its expressions, of which there are many more, need not be looked through."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below it."""
    for part in parts(node):
        yield part
        yield from statements(part)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_not_kept() -> Iterator[None]:
    """The garbage collector would walk over them in all tests that follow."""
    yield
    ours.cache_clear()
    modules.cache_clear()


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of everything that is imported anywhere in it: inside of functions and for type checkers, too."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def ours(tree: ast.AST) -> frozenset[str]:
    """The modules of ours that are imported; ``testing.faults`` of a tool."""
    known, found = modules(), set()
    for name in imported(tree):
        inner = name.removeprefix("onceflow.")
        if inner == name:
            continue
        while inner and inner not in known and inner.partition(".")[0] not in TOOLS:
            inner = inner.rpartition(".")[0]
        found.add(inner or LAZY)
    return frozenset(found)


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From ``def`` to the end, without the docstring."""
    assert node.end_lineno is not None
    first = node.body[0]
    has_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    doc = (first.end_lineno or 0) - first.lineno + 1 if has_doc else 0
    return node.end_lineno - node.lineno + 1 - doc


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their qualified names."""
    for node in parts(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inside + node.name, node
        name = f"{inside}{node.name}." if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else inside
        yield from functions(node, name)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_imports_are_found_wherever_they_are() -> None:
    places = (
        "import a\nclass C:\n    import b\n    async def f(self):\n        import c\n",
        "try:\n    import d\nexcept E:\n    import e\nelse:\n    import f\nfinally:\n    import g\n",
        "for x in y:\n    import h\nelse:\n    import i\nwhile x:\n    import j\nwith x:\n    import k\n",
        "if x:\n    import l\nelif y:\n    import m\nelse:\n    from n import o\n",
        "match x:\n    case 1:\n        import p\n",
    )
    assert sorted(imported(ast.parse("".join(places)))) == [*"abcdefghijklm", "n.o", "p"]


def test_no_module_imports_itself_over_others() -> None:
    graph = {name: ours(tree) & set(modules()) - {LAZY, name} for name, tree in modules().items() if name != LAZY}
    assert sum(map(len, graph.values())) > 300, "imports are read"
    assert circles(graph) == []


def package_of(name: str) -> str:
    """The package of a module; a module beside the packages is its own. ``client.auth`` is a part of ``client``."""
    package = name if (ROOT / Path(*name.split("."))).is_dir() else name.rpartition(".")[0] or name
    return "client" if package.startswith("client.") else package


def imports_of_packages() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for name, tree in modules().items():
        if name != LAZY:
            others = {package_of(other) for other in ours(tree) if other.partition(".")[0] not in TOOLS}
            graph.setdefault(package_of(name), set()).update(others - {LAZY, package_of(name)})
    return graph


def test_no_package_imports_itself_over_others() -> None:
    graph = imports_of_packages()
    assert len(graph) > 30, "packages, and the modules beside them"
    assert circles(graph) == []


def test_nothing_imports_the_tools_around_it() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        for other in ours(tree)
        if other.partition(".")[0] in TOOLS
    ]
    assert wrong == []


def test_nothing_imports_the_workshop() -> None:
    """Demos, chaos runs and benchmarks are another distribution, which users need not have."""
    wrong = [file for file in ROOT.rglob("*.py") if re.search(r"onceflow_workshop", file.read_text())]
    assert wrong == []


def test_nothing_names_the_tools_around_it_to_load_them_later() -> None:
    """A name in a string is an import, too; the product itself loads only what a user names."""
    loads = re.compile(rf"onceflow\.({'|'.join(TOOLS)})(\.\w+)*:?")
    wrong = [
        f"{name}: {node.value!r}"
        for name, tree in modules().items()
        if loads.search((ROOT / path(name)).read_text())  # most modules need not be looked through
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and loads.fullmatch(node.value)
    ]
    assert wrong == []


def test_packages_import_what_is_allowed() -> None:
    found = {
        package: others - EVERYBODYS
        for package, others in imports_of_packages().items()
        if (ROOT / Path(*package.split("."))).is_dir() and others - EVERYBODYS
    }
    assert found == {package: set(names.split()) for package, names in ALLOWED.items() if names}


def test_packages_say_what_they_are() -> None:
    """What a package owns, what it may import, and where to start: in its docstring."""
    for folder in sorted({(ROOT / path(name)).parent for name in modules()} - {ROOT}):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert "It may import" in text, folder
        first = re.search(r"Start (?:reading )?at ``([\w/]+\.py)``", text)
        assert first is not None, folder
        assert (folder / first[1]).is_file(), first[1]


def test_sockets_are_opened_where_they_may_be() -> None:
    """Connections to brokers are those of ``client``. The others lead elsewhere."""
    known = {"server", "service", "metrics", "external", "object_storage", "broker"}
    wrong = [
        name
        for name, tree in modules().items()
        if name.partition(".")[0] not in {"client", *known}
        and any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("socket.socket", "socket.create_connection")
            for node in ast.walk(tree)
        )
    ]
    assert wrong == ["driver.standby.door"], "a door tells that a process lives, and asks nothing"


def test_formats_need_no_sockets() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if name.partition(".")[0] == "protocol"
        for other in imported(tree)
        if other.partition(".")[0] in ("asyncio", "kafka", "pyspark", "requests", "selectors", "socket", "urllib")
    ]
    assert wrong == []


def test_modules_fit_a_newcomer() -> None:
    counts = {name: len((ROOT / path(name)).read_text().splitlines()) for name in modules()}
    long = {name for name, count in counts.items() if count > MAX_MODULE_LINES}
    assert long == set(LONG_MODULES), f"{MAX_MODULE_LINES} lines at most, or a reason; the list has no others"


def test_functions_fit_a_page() -> None:
    long = {
        f"{name}.{function}"
        for name, tree in modules().items()
        for function, node in functions(tree)
        if lines_of(node) > MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS), f"{MAX_FUNCTION_LINES} lines at most, or a reason; the list has no others"


def path(name: str) -> Path:
    if name == LAZY:
        return Path("__init__.py")
    inner = Path(*name.split("."))
    return inner / "__init__.py" if (ROOT / inner).is_dir() else inner.with_suffix(".py")
