"""Checks of this machine: Python, Java, Spark, Spark's Kafka connector, packages, and the limit of open files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.admin.doctor.finding import Finding, error, ok, warning
from onceflow.host import jars
from onceflow.host.java import find_java, java_version, major_version
from onceflow.spark import versions

PYTHON_MIN = (3, 10)
#: Versions of Java that Spark 3.5 to 4.2 are made for, as far as onceflow is tested.
JAVA_TESTED = (17, 21)
_SESSION = "import onceflow; onceflow.session(app_name='onceflow doctor', master='local[1]').stop()"
_SESSION_S = 180.0
FILES_MIN, FILES_GOOD = 256, 4096
_CONNECTOR = re.compile(r"spark-sql-kafka-0-10_(\d+\.\d+)[-:](\d+\.\d+(?:\.\d+)?)")
#: The packages that decide whether a flow works, with the versions that fit: from the first one, below the second one.
#: The same ranges are in pyproject.toml.
PACKAGES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "kafka-python": ((3, 0, 12), (3, 1)),
    "pyarrow": ((18,), None),
    "pandas": ((2, 2), (3,)),
    "numpy": ((1, 26), None),
    "lmdb": ((1, 4), None),
}


@dataclass(frozen=True)
class Host:
    """This machine.

    Args:
        state_dirs: folders of local state.
        spark_settings: settings in spark-defaults.conf and PYSPARK_SUBMIT_ARGS.
    """

    state_dirs: tuple[Path, ...]
    spark_settings: Mapping[str, str] = field(default_factory=dict)


def check_python(_: Host) -> Iterator[Finding]:
    """The version of Python."""
    found = f"{platform.python_version()}, {sys.executable}"
    needed = ".".join(map(str, PYTHON_MIN))
    if sys.version_info[:2] < PYTHON_MIN:
        yield error("Python", f"{found}; {needed} or later is needed", f"install Python {needed} or later")
    else:
        yield ok("Python", found)


def check_java(_: Host) -> Iterator[Finding]:
    """Which Java Spark will use, and its version."""
    java = find_java()
    version = java_version(java)
    home = os.environ.get("JAVA_HOME")
    found = f"Java {version}, {java} ({'of JAVA_HOME' if home else 'on PATH, JAVA_HOME is not set'})"
    if (major_version(version) or 0) > max(JAVA_TESTED):
        tested = " and ".join(map(str, JAVA_TESTED))
        yield warning(
            "Java", f"{found}; onceflow is used with Java {tested}", f"set JAVA_HOME to a Java {JAVA_TESTED[0]}"
        )
    else:
        yield ok("Java", found)


def check_spark(_: Host) -> Iterator[Finding]:
    """The version of PySpark, and of the Spark whose jars it uses."""
    versions.check()
    installed, running = jars.installed_spark_version(), jars.jars_version()
    if versions.parsed(running) != versions.parsed(installed):
        yield error(
            "Spark",
            f"pyspark {installed} with jars of Spark {running} (SPARK_HOME={os.environ.get('SPARK_HOME', 'not set')})",
            "install the pyspark of the same version, or correct SPARK_HOME",
        )
    else:
        yield ok("Spark", f"{installed}; onceflow runs on {versions.names(versions.SUPPORTED)}")


def check_connector(host: Host) -> Iterator[Finding]:
    """The jars of Spark's Kafka connector: where they come from, and whether they are of this Spark."""
    version, scala = jars.installed_spark_version(), jars.scala_version()
    named = [
        (f"{name} in Spark's settings", match)
        for name in ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")
        for match in _CONNECTOR.finditer(host.spark_settings.get(name, ""))
    ]
    with_spark = [("Spark's folder of jars", match) for jar in jars.spark_jars() if (match := _CONNECTOR.match(jar))]
    for where, match in [*named, *with_spark]:
        yield _connector(where, match[1], match[2], scala, version)
    if named or with_spark:
        return
    cached = jars.cached(jars.spark_connector_coordinates(version, scala))
    if cached is None:
        yield warning(
            "Kafka connector",
            f"its jars for Spark {version} are not in {jars.cache_dir()}; the first session downloads them",
            "run `onceflow setup` while the network is there",
        )
    for jar in cached or []:
        if match := _CONNECTOR.match(jar.name):
            yield _connector(str(jar.parent), match[1], match[2], scala, version)


def _connector(where: str, scala: str, version: str, spark_scala: str, spark_version: str) -> Finding:
    found = f"{version} for Scala {scala}, in {where}"
    if scala == spark_scala and versions.parsed(version) == versions.parsed(spark_version):
        return ok("Kafka connector", found)
    return error(
        "Kafka connector",
        f"{found}, does not fit Spark {spark_version} with Scala {spark_scala}",
        f"use spark-sql-kafka-0-10_{spark_scala} of version {spark_version}, or remove it there: onceflow.session "
        "brings the jars that fit",
    )


def check_packages(_: Host) -> Iterator[Finding]:
    """The versions of the Kafka clients and of other packages."""
    for name, (first, below) in PACKAGES.items():
        wanted = f">={_text(first)}" + (f",<{_text(below)}" if below else "")
        fix = f"pip install '{name}{wanted}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield error(name, "is not installed", fix)
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if numbers < first or (below is not None and numbers >= below):
            yield error(name, f"{version}; onceflow needs {wanted}", fix)
        else:
            yield ok(name, version)


def check_open_files(_: Host) -> Iterator[Finding]:
    """The limit of open files (``ulimit -n``)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    fix = "raise it, for example `ulimit -n 65536`, or LimitNOFILE= of the service"
    if soft != resource.RLIM_INFINITY and soft < FILES_GOOD:
        most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        found = f"{allowed} (at most {most} without root); shuffles, local stores and connections need more"
        yield error("open files", found, fix) if soft < FILES_MIN else warning("open files", found, fix)
    else:
        yield ok("open files", allowed)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_session(_: Host) -> Iterator[Finding]:
    """Whether ``onceflow.session()`` gives a session, in a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-c", _SESSION]
    try:
        # Without the folder in which this command was called: Spark would import a file named queue.py from there.
        # Python 3.10 does not know the variable.
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SESSION_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        yield error("session", f"Spark has not started within {_SESSION_S:g} s", f'see why: python -c "{_SESSION}"')
        return
    if not done.returncode:
        yield ok("session", f"Spark starts, in {time.monotonic() - began:.0f} s")
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    found = next((line for line in reversed(said) if line.startswith("onceflow.errors.")), said[-1] if said else "")
    steps = [line.removeprefix("next step: ") for line in said if line.startswith("next step: ")]
    found = found.removeprefix("onceflow.errors.") or f"its process has ended with code {done.returncode}"
    yield error("session", f"Spark does not start: {found}", steps[-1] if steps else f'see: python -c "{_SESSION}"')
