"""When it is looked at whether tasks can load what a query sends them, and what is said when they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import imports
from onceflow.spark.import_errors import import_error
from onceflow.spark.imports import ImportCheck
from onceflow.spark.pickling import LoadFailure, Pickled


class Context:
    """A SparkContext as far as it is needed: it knows how many executors there are."""

    def __init__(self, master: str, executors: int = 0) -> None:
        self.master = master
        self.environment: dict[str, str] = {}
        self.pythonExec = sys.executable
        self.executors = executors

    @property
    def _jsc(self) -> Any:
        blocks = SimpleNamespace(size=lambda: self.executors + 1)
        return SimpleNamespace(
            sc=lambda: SimpleNamespace(getExecutorMemoryStatus=lambda: blocks, isStopped=lambda: False)
        )

    def getLocalProperty(self, name: str) -> None:
        return None


class Tasks:
    """Stands for the job: what it was given, and what it answers."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, context: Any, pickles: list[bytes]) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def check_of(context: Context, sent: Pickled) -> ImportCheck:
    spark: Any = SimpleNamespace(sparkContext=context)
    return ImportCheck(spark, [sent], flow="balances")


BALANCE = Pickled("the processor Balance", b"balance", frozenset(["ledger"]))


def test_without_an_executor_the_first_batch_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_load_in_task", tasks := Tasks([None]))
    context = Context("spark://host:7077")
    check = check_of(context, BALANCE)
    check.at_start()
    assert tasks.asked == 0, "a start does not wait for executors"
    check.finish()
    check.finish()
    assert tasks.asked == 1
    context.executors = 1
    check_of(context, BALANCE).at_start()
    assert tasks.asked == 1, "it has passed in this application"
    check_of(context, Pickled("the function f", b"another")).at_start()
    assert tasks.asked == 2


def test_a_task_that_does_not_come_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(imports, "_load_in_task", tasks := Tasks(None))
    for _ in range(2):
        check_of(Context("spark://host:7077", 1), BALANCE).at_start()
    assert "not checked whether tasks find its modules" in caplog.text
    assert tasks.asked == 2


@pytest.mark.parametrize(
    "answer, words, next_step",
    [
        (
            [LoadFailure("ModuleNotFoundError", "No module named 'ledger'")],
            "Tasks cannot import the module 'ledger', which the processor Balance needs",
            "Packaging your code",
        ),
        (
            [LoadFailure("AttributeError", "Can't get attribute 'Balance' on <module 'ledger' from '/opt/ledger.py'>")],
            "Tasks cannot load the processor Balance",
            "in the same versions",
        ),
        (
            PySparkException("Traceback\nModuleNotFoundError: No module named 'onceflow'\n\n\tat org.apache"),
            "Tasks cannot import the module 'onceflow'",
            "install onceflow",
        ),
        (PySparkException("Cannot run program python3"), "Tasks cannot run Python code", "spark.pyspark.python"),
    ],
)
def test_what_tasks_lack(monkeypatch: pytest.MonkeyPatch, answer: Any, words: str, next_step: str) -> None:
    monkeypatch.setattr(imports, "_load_in_task", Tasks(answer))
    with pytest.raises(EnvironmentUnusableError) as caught:
        check_of(Context("spark://host:7077", 1), BALANCE).at_start()
    assert caught.value.what.startswith(words)
    assert next_step in caught.value.next_step
    assert caught.value.flow == "balances"


@pytest.mark.parametrize(
    "line, module",
    [
        ("ModuleNotFoundError: No module named 'a.b'", "the module 'a.b'"),
        ("ImportError: cannot import name 'x' from 'a' (/opt/a.py)", "the module 'a'"),
        ("ImportError: cannot import name 'x' from partially initialized module 'a' (most likely)", "the module 'a'"),
        ("ImportError: lxml not found", "a module"),
    ],
)
def test_lines_that_tell_of_an_import(line: str, module: str) -> None:
    error = import_error(line)
    assert error is not None
    assert error.what == f"Tasks cannot import {module}"


def test_other_lines() -> None:
    assert import_error("ValueError: No module named 'a'") is None


def test_what_workers_of_this_machine_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told without a worker: no process is started for what is beside the script or installed."""
    file = tmp_path / "beside_the_script.py"
    file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "beside_the_script", SimpleNamespace(__file__=str(file)))
    context: Any = Context("local[2]")
    asked: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        asked.append(command[3:])
        return run(command, **options)

    monkeypatch.setattr(imports.subprocess, "run", counted)
    assert imports.are_found(context, ["json", "__main__", "pyspark.sql", "beside_the_script"])
    assert asked == []
    sys.path.remove(str(tmp_path))
    assert not imports.are_found(context, ["pyspark", "beside_the_script"])
    context.environment["PYTHONPATH"] = str(tmp_path)
    assert imports.are_found(context, ["beside_the_script"])
    assert asked == [["beside_the_script"]] * 2
    context.pythonExec = str(tmp_path / "absent")
    assert not imports.are_found(context, ["pyspark"]), "another Python: nobody knows what it has"
