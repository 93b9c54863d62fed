"""Checks that tasks can load what a query sends them, before a batch depends on it.

A batch that the driver reads runs in its own process, which has all modules of the program. One that tasks read runs in
Python workers. If only the driver could find a module, the first batch of a backlog would fail.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import sysconfig
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import function_names, jvm, plans, shipping
from onceflow.spark.import_errors import cannot_import, import_error
from onceflow.spark.master import is_local
from onceflow.spark.pickling import (
    LoadFailure,
    Pickled,
    load_failure,
    pickled,
)
from onceflow.state.spec import ProcessSpec

log = logging.getLogger("onceflow")

_SECONDS = 30.0
# A worker reads a broadcast variable from a file that is sent together with the function. So this is not checked.
_BROADCAST = b"pyspark.core.broadcast"
_FIND = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))"

_EVERYWHERE = sys.stdlib_module_names | {"__main__", "onceflow"}

_passed: weakref.WeakKeyDictionary[SparkContext, set[bytes]] = weakref.WeakKeyDictionary()


class ImportCheck:
    """Checks what one query sends to tasks. What has passed once in a Spark application is not checked again."""

    def __init__(self, spark: SparkSession, sent: Iterable[Pickled], *, flow: str) -> None:
        self._spark = spark
        self._flow = flow
        self._local = is_local(spark)
        self._passed = _passed.setdefault(spark.sparkContext, set())
        self._waiting = [
            each
            for each in sent
            if _digest(each) not in self._passed
            and _BROADCAST not in each.data
            and not (self._local and each.names and are_found(spark.sparkContext, each.names))
        ]

    def at_start(self) -> None:
        """Check now, unless there is no executor yet: a start does not wait for one.

        Raises:
            EnvironmentUnusableError: a module is missing. The text has its name, and what needs it.
        """
        context: Any = self._spark.sparkContext._jsc
        if self._local or context.sc().getExecutorMemoryStatus().size() > 1:
            self.finish()

    def finish(self) -> None:
        """Check now, if `at_start` has not.

        Raises:
            EnvironmentUnusableError: see `at_start`.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            found = _load_in_task(self._spark.sparkContext, [each.data for each in waiting])
        except (PySparkException, Py4JError) as error:
            if jvm.was_cancelled(error) or jvm.is_being_stopped(self._spark):
                raise
            refusal = cannot_import(error) or EnvironmentUnusableError(
                "Tasks cannot run Python code of the driver",
                detail=jvm.first_line(error),
                next_step="make sure that the Python that runs tasks (spark.pyspark.python) has the driver's packages",
            )
            raise refusal.locate(flow=self._flow) from error
        if found is None:
            log.warning("flow %s: not checked whether tasks find its modules: no task has run in time", self._flow)
            return
        for each, failure in zip(waiting, found, strict=True):
            if failure is not None:
                raise _refusal(each, failure).locate(flow=self._flow)
        self._passed.update(map(_digest, waiting))


class Sent(Protocol):
    """A function that tasks get."""

    pickled: Pickled


class Mapped(Protocol):
    """A function of ``Flow.map``."""

    function: Any  # a `Sent`


def sent_to_tasks(df: DataFrame, specs: Sequence[ProcessSpec], flow: str, maps: Mapping[str, Mapped]) -> list[Pickled]:
    """What tasks have to load for a query: processors, the user's own stores, functions.

    Args:
        specs: of the process steps.
        maps: the functions of ``Flow.map``, by their names in plans. The query may use some of them only.
    """
    stores = {spec.store for spec in specs if not spec.store.__module__.startswith("onceflow.")}
    own = [pickled(sent, flow=flow) for sent in (*(spec.processor for spec in specs), *stores)]
    for function in functions_of(df):
        # Which modules a function needs is only known where it is pickled here.
        mapped = maps.get(function.function)
        own.append(function if mapped is None else mapped.function.pickled)
    return own


def functions_of(df: DataFrame) -> list[Pickled]:
    """The user's Python functions in a query, as Spark has pickled them."""
    java: Any = df.sparkSession._jvm
    mark = java.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()
    found: list[Pickled] = []
    for node in jvm.nodes(plans.analyzed(df), mark):
        expressions = node.expressions()
        for expression in map(expressions.apply, range(expressions.size())):
            for function in jvm.nodes(expression, mark):
                if not jvm.kind(function).startswith("Python"):
                    continue  # an expression around it, which may have no name
                name = str(function.name())
                if function_names.is_ours(name) and not function_names.is_join(name):
                    continue
                command = function.func().command().toArray(java.scala.reflect.ClassTag.Byte())
                found.append(
                    Pickled(f"the function {function_names.function_of_map(name)}", bytes(command), function=name)
                )
    return found


def _refusal(sent: Pickled, failure: LoadFailure) -> EnvironmentUnusableError:
    line = f"{failure.kind}: {failure.text}".splitlines()[0]
    return import_error(line, sent.what) or EnvironmentUnusableError(
        f"Tasks cannot load {sent.what}",
        detail=line,
        next_step="make sure that tasks have the same modules as the driver, in the same versions",
    )


def _digest(sent: Pickled) -> bytes:
    return hashlib.sha256(sent.data).digest()


def _load_in_task(context: SparkContext, pickles: Sequence[bytes]) -> list[LoadFailure | None] | None:
    """For each pickle, why it cannot be loaded, or None. Returns None as a whole when no task has run in time."""
    group = f"onceflow-imports-{uuid.uuid4()}"
    found: list[list[LoadFailure | None]] = []
    problems: list[BaseException] = []

    def run() -> None:
        context.setJobGroup(group, "onceflow: whether tasks can load what the query sends them")
        try:
            found.append(context.parallelize(pickles, 1).map(load_failure).collect())
        except BaseException as problem:
            problems.append(problem)

    thread = InheritableThread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    if thread.is_alive():
        context.cancelJobGroup(group)
        return None
    if problems:
        raise problems[0]
    return found[0] if found else None  # Spark has stopped before it began


def are_found(context: SparkContext, names: Iterable[str]) -> bool:
    """Whether workers on this machine will find modules, found out without a worker: from the folders in which the
    driver has found them, or by starting the Python that workers use, which takes 30 ms."""
    known = set(shipping.program_folders())
    known |= {os.path.abspath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    same = context.pythonExec == sys.executable
    asked = set()
    for name in names:
        top = name.partition(".")[0]
        if top not in _EVERYWHERE and not (same and shipping.root_of(name) in known):
            asked.add(top)
    if not asked:
        return True
    variable = filter(None, (context.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")))
    try:
        answer = subprocess.run(
            [context.pythonExec, "-c", _FIND, *asked],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(variable)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0
