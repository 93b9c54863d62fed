"""Modules of the user's own: what tasks find, and what is said of what they do not find."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow.testing import independent

pytestmark = pytest.mark.integration

PROCESSOR = """
import onceflow
from helpers import words


class Count(onceflow.Processor):
    key = onceflow.serdes.STRING
    state = output = onceflow.serdes.JSON

    def process(self, key, records, state):
        import loaded_late

        for record in records:
            count = state.get(0) + 1
            state.put(count)
            yield onceflow.Record(key, {"count": count, "word": words.louder(record.value.decode(), loaded_late.END)})
"""

SERVICE = """
import json, sys

from counting import Count
from helpers import words
from pyspark.sql import functions as F

import onceflow

bootstrap_servers, name, source, target, state_dir, master = sys.argv[1:]
if not master.startswith("local["):
    import loaded_late  # to a cluster only what is loaded is sent
sizes = {"spark.driver.memory": "700m", "spark.executor.memory": "600m"}
spark = onceflow.session(name, master=master, config=sizes)
flow = onceflow.Flow(name, spark, bootstrap_servers=bootstrap_servers)
upper = F.udf(words.upper)
rows = flow.read(source).withColumn("value", upper(F.col("value").cast("string")))
counts = flow.process(rows, Count(), table=name + "-counts", state_dir=state_dir)
# What a backlog does by its size: tasks do the work, not the driver.
query = flow.write(counts, topic=target, once=True, engine="tasks").start()
query.awaitTermination()
print(json.dumps([batch.path for batch in query.batches]))
"""

WORDS = """
def upper(text):
    return text.upper()


def louder(text, end):
    return text + end
"""


@pytest.mark.long
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,600]"])
def test_modules_beside_the_script(make_pipe: Callable[..., Any], tmp_path: Path, master: str) -> None:
    """A service started from another folder: its processor, what that imports, a function, a module loaded late."""
    pipe = make_pipe(partitions=2)
    pipe.fill(60, keys=6)
    program, elsewhere = tmp_path / "program", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, text in {
        "service.py": SERVICE,
        "counting.py": PROCESSOR,
        "loaded_late.py": "END = '!'",
        "helpers/__init__.py": "",
        "helpers/words.py": WORDS,
    }.items():
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text(text)
    arguments = [pipe.bootstrap, pipe.flow, pipe.source, pipe.target, str(tmp_path / "state"), master]
    done = subprocess.run(
        [sys.executable, str(program / "service.py"), *arguments],
        cwd=elsewhere,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    (path,) = json.loads(done.stdout.splitlines()[-1])
    assert "task" in path
    seen = [json.loads(record.value or b"") for record in independent.read_topic(pipe.bootstrap, pipe.target)]
    assert sorted(found["word"] for found in seen) == sorted(f"{(value or b'').decode()}!" for _, value in pipe.sent)
    assert sorted(found["count"] for found in seen) == sorted(list(range(1, 11)) * 6)


@pytest.fixture
def of_the_driver(tmp_path: Path) -> ModuleType:
    """A module that the driver has loaded from a place where nobody looks."""
    name = f"of_the_driver_{os.getpid()}"
    file = tmp_path / f"{name}.py"
    file.write_text(PROCESSOR.replace("from helpers import words", "def same(value):\n    return value"))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("what", ["processor", "function"])
def test_a_module_that_only_the_driver_has(make_pipe: Callable[..., Any], of_the_driver: Any, what: str) -> None:
    """Refused at the start, whatever the size of a batch, and though there is none: nothing is to read."""
    pipe = make_pipe(partitions=1)
    with pipe.open() as flow:
        rows = flow.read(pipe.source).select("key", "value")
        if what == "processor":
            rows = flow.process(rows, of_the_driver.Count(), table=f"{pipe.target}-counts")
        else:
            rows = rows.withColumn("value", F.udf(of_the_driver.same)(F.col("value").cast("string")))
        # If the driver reads and runs the processor, no task imports anything, so nothing is checked.
        write = flow.write(rows, topic=pipe.target, engine="tasks")
        for _ in range(2):
            with pytest.raises(onceflow.EnvironmentUnusableError) as caught:
                write.start()
            needs = "the processor Count" if what == "processor" else "the function same"
            module = of_the_driver.__name__
            assert caught.value.what == f"Tasks cannot import the module '{module}', which {needs} needs"
            assert caught.value.flow == pipe.flow
            assert str(of_the_driver.__file__) in caught.value.detail
            assert "Packaging your code" in caught.value.next_step


@pytest.mark.long
def test_a_module_that_a_function_imports_late(make_pipe: Callable[..., Any]) -> None:
    """Only a task can find out: the batch is not run again, and the error names the module."""
    late = F.udf(lambda _: str(__import__("never_installed")))
    pipe = make_pipe(partitions=1)
    pipe.fill(1)
    with pipe.open() as flow:
        rows = flow.read(pipe.source).select("key", late(F.col("key")).alias("value"))
        query = flow.write(rows, topic=pipe.target).start()
        with pytest.raises(onceflow.EnvironmentUnusableError, match="cannot import the module 'never_installed'"):
            query.awaitTermination(90)
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []
