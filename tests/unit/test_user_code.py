"""The line of user code in the text of a traceback, as Spark hands on those of its Python workers."""

from __future__ import annotations

import decimal
import json
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import onceflow
from onceflow import user_code
from onceflow.spark.jvm import blamed_line

PREFIX = "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent failure: Lost task 0.0: "
JAVA = "\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)"
WORKER = '  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1234, in main\n    process()\n'
CLEAN = '  File "/app/service.py", line 31, in clean\n    raise ValueError(amount)\n    ^^^^^^^^^^^^^\n'
DECODER = '  File "/usr/lib/python3.12/json/decoder.py", line 355, in raw_decode\n    raise JSONDecodeError()\n'
PANDAS = '  File "/app/env/lib/python3.12/site-packages/pandas/core/series.py", line 4, in map\n    work()\n'
CYTHON = '  File "pandas/_libs/ops.pyx", line 9, in pandas._libs.ops.vec\n'
TASK = '  File "/app/env/lib/python3.12/site-packages/onceflow/task/state_tasks.py", line 9, in rows\n    work()\n'
SHOP = '  File "/app/env/lib/python3.12/site-packages/shop/clean.py", line 5, in clean\n    work()\n'


def text(*frames: str, said: str = "ValueError: bad amount 'x'") -> str:
    return f"Traceback (most recent call last):\n{''.join(frames)}{said}\n"


@pytest.mark.parametrize(
    "given, told",
    [
        (text(WORKER, CLEAN), "ValueError: bad amount 'x' (raised in clean, service.py:31)"),
        (f"{PREFIX}{text(WORKER, CLEAN)}{JAVA}", "ValueError: bad amount 'x' (raised in clean, service.py:31)"),
        (text(WORKER, CLEAN, DECODER, PANDAS, CYTHON), "ValueError: bad amount 'x' (raised in clean, service.py:31)"),
        (text(WORKER, TASK, SHOP, DECODER, PANDAS, CYTHON), "ValueError: bad amount 'x' (raised in clean, clean.py:5)"),
        (text(WORKER, TASK), "ValueError: bad amount 'x'"),
        (text(CLEAN, said="shop.Overdrawn"), "shop.Overdrawn (raised in clean, service.py:31)"),
        (text(said="ValueError: hidden"), "ValueError: hidden"),
        (
            text(CLEAN, said="pydantic.ValidationError: 1 error\namount\n  no number"),
            "pydantic.ValidationError: 1 error; amount; no number (raised in clean, service.py:31)",
        ),
        (
            text(CLEAN, said="ValueError: one\n\nJVM stacktrace:\nError: other"),
            "ValueError: one (raised in clean, service.py:31)",
        ),
        (text(CLEAN, said=f"E: {'x' * 9000}"), f"E: {'x' * 497}... (9003 characters) (raised in clean, service.py:31)"),
        (
            f"{text(CLEAN)}{JAVA}\nCaused by: X: {text(said='OSError: later')}",
            "ValueError: bad amount 'x' (raised in clean, service.py:31)",
        ),
        ("first line\nlast line", "first line"),
        ("Job aborted\njava.lang.IllegalStateException: closed\n\tat x", "java.lang.IllegalStateException: closed"),
        ("", ""),
    ],
)
def test_what_a_failed_job_says(given: str, told: str) -> None:
    assert blamed_line(given) == told


@pytest.mark.parametrize("cause", ["from error", ""])
def test_of_exceptions_in_a_chain_the_last_one_is_told(cause: str) -> None:
    scope: dict[str, object] = {}
    source = f"""
def convert():
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("no amount") {cause}
"""
    exec(compile(source, "/app/service.py", "exec"), scope)  # noqa: S102
    try:
        scope["convert"]()  # type: ignore[operator]
    except RuntimeError:
        said = traceback.format_exc()
    assert user_code.blamed(said) == "RuntimeError: no amount (raised in convert, service.py:6)"


def test_what_is_the_users() -> None:
    assert user_code.is_of_user(__file__)
    assert user_code.is_of_user("/databricks/<command-12>")
    assert user_code.is_of_user("/home/ada/onceflow/service.py")
    for path in ("task/state_run.py", "state/engine/base.py", "client/auth/jaas.py", "task/row_writer.py"):
        assert (Path(onceflow.__file__).parent / path).exists()
        assert not user_code.is_of_user(f"/home/ada/env/onceflow/{path}")
    assert not user_code.is_of_user(user_code.__file__)
    assert not user_code.is_of_user(traceback.__file__)
    assert not user_code.is_of_user(str(Path(pytest.__file__)))
    assert not user_code.is_of_user("<frozen importlib._bootstrap>")
    assert not user_code.is_of_user(str(Path(sys.prefix) / "lib/python3.9/site-packages/pyspark/worker.py"))


@pytest.mark.parametrize(
    "problem, repeats",
    [
        (ZeroDivisionError("x"), True),
        (OverflowError(), True),
        (AssertionError(), True),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), True),
        (KeyError("name"), True),
        (ValueError("a\nb: c"), True),
        (RecursionError(), True),
        (FileExistsError("part-0"), True),
        (FileNotFoundError("it may come"), False),
        (ConnectionRefusedError(), False),
        (TimeoutError(), False),
        (RuntimeError(), False),
        (MemoryError(), False),
        (json.JSONDecodeError("x", "y", 0), False),
        (onceflow.DeadlineExceededError("x"), False),
        (StopIteration(), False),
    ],
    ids=repr,
)
def test_which_errors_come_again(problem: Exception, repeats: bool) -> None:
    """In this process, and in a worker whose traceback is all that is known."""
    assert user_code.repeats(problem) == repeats
    try:
        raise problem
    except Exception:
        text = f"An exception was thrown from the Python worker:\n{traceback.format_exc()}"
    assert user_code.repeats_in_worker(text) == repeats
    assert not user_code.repeats_in_worker(str(problem)), "no traceback: no function has raised it"


def _decimal() -> None:
    decimal.Decimal("abc")


def _arrow() -> None:
    pa.scalar("abc").cast(pa.int64())


def _struct() -> None:
    struct.unpack("q", b"")


@pytest.mark.parametrize("function", [_decimal, _arrow, _struct])
def test_errors_of_libraries_that_come_again(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        text = traceback.format_exc()
    assert user_code.repeats_in_worker(text)
