"""Only the package ``spark`` touches py4j, the JVM, or what PySpark does not promise to keep."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import onceflow

SOURCE = Path(onceflow.__file__).parent
OTHERS = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "spark")
# What PySpark documents for its users.
PUBLIC = frozenset(
    {
        "pyspark",
        "pyspark.accumulators",
        "pyspark.errors",
        "pyspark.sql",
        "pyspark.sql.functions",
        "pyspark.sql.streaming",
        "pyspark.sql.streaming.query",
        "pyspark.sql.streaming.readwriter",
        "pyspark.sql.streaming.stateful_processor",
        "pyspark.sql.types",
    }
)
PRIVATE_ATTRIBUTES = frozenset(
    {
        "_active_spark_context",
        "_ensure_initialized",
        "_gateway",
        "_jc",
        "_jdf",
        "_jsc",
        "_jsparkSession",
        "_jsq",
        "_jvm",
        "_jwrite",
    }
)
# Without one of these words a module has none of the names.
SUSPECT = re.compile("|".join(["py4j", "pyspark", *sorted(PRIVATE_ATTRIBUTES)]))


def found_in(tree: ast.AST) -> Iterator[str]:
    """Names in a module that belong into ``spark``."""
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "pyspark":  # `from pyspark import cloudpickle`
                modules += [f"pyspark.{alias.name}" for alias in node.names if alias.name.islower()]
        for module in modules:
            if module.partition(".")[0] == "py4j" or (module.startswith("pyspark") and module not in PUBLIC):
                yield module
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            yield node.attr


def test_nothing_private_of_spark_outside_its_package() -> None:
    assert len(OTHERS) > 300
    found = {}
    for path in OTHERS:
        text = path.read_text()
        if SUSPECT.search(text):  # most modules need not be parsed
            found[path.relative_to(SOURCE).as_posix()] = sorted(set(found_in(ast.parse(text))))
    assert {path: names for path, names in found.items() if names} == {}


def test_the_test_finds_what_it_looks_for() -> None:
    code = "from py4j.protocol import Py4JError\nfrom pyspark import SparkContext, cloudpickle\nframe._jdf.schema()"
    assert sorted(found_in(ast.parse(code))) == ["_jdf", "py4j.protocol", "pyspark.cloudpickle"]
    for name in ("jvm.py", "collect.py", "pickling.py"):
        text = (SOURCE / "spark" / name).read_text()
        assert SUSPECT.search(text)
        assert list(found_in(ast.parse(text)))
