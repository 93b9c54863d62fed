"""The project of `onceflow new` can be installed, and its tests pass as they are: on a real Kafka and a real Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from onceflow.cli.new import new

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.long
def test_a_new_project_passes_its_tests(onceflow_broker: str, tmp_path: Path) -> None:
    project, packages, report = tmp_path / "my-orders", tmp_path / "packages", tmp_path / "report.xml"
    answer = CliRunner().invoke(new, ["my-orders", "--directory", str(project)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output

    # As its Makefile does, but with the packages that are here: no network.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    run([*pip, "--no-deps", "--no-build-isolation", "--target", str(packages), str(project)], tmp_path)
    assert (packages / "my_orders" / "service.py").is_file()

    tests = [sys.executable, "-m", "pytest", "--junitxml", str(report), "--durations", "0"]
    run(tests, project, PYTHONPATH=str(packages), ONCEFLOW_TEST_BOOTSTRAP=onceflow_broker)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("failures", "errors", "skipped")}
    assert counts == {"failures": 0, "errors": 0, "skipped": 0}
    modules = [case.attrib["classname"] for case in suite.iter("testcase")]
    assert set(modules) == {"tests.test_service", "tests.test_flow", "tests.test_integration"}
    assert modules.count("tests.test_integration") == 2


def run(command: Sequence[str], folder: Path, **environment: str) -> None:
    answer = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    print(answer.stdout)
