"""JVM options for a local master with few cores: they are added, and what the user has chosen stays."""

from __future__ import annotations

import pytest

from onceflow.session import _sockets_fit
from onceflow.spark.jvm_options import FEW_CORES, for_cores


@pytest.mark.parametrize("cores", [1, FEW_CORES])
def test_few_cores(cores: int) -> None:
    words = for_cores("-Dx=1", cores).split()
    assert words[0] == "-Dx=1"
    assert "-XX:+UseSerialGC" in words
    assert sum(word.startswith("-XX:Tier4") for word in words) == 4


def test_many_cores() -> None:
    assert for_cores("-Dx=1", FEW_CORES + 1) == "-Dx=1"


@pytest.mark.parametrize("given", ["-XX:+UseG1GC", "-XX:+UseZGC -Da=b", "-XX:+UseParallelGC"])
def test_a_garbage_collector_of_the_user(given: str) -> None:
    assert "SerialGC" not in for_cores(given, 1)
    assert "Tier4" in for_cores(given, 1)


@pytest.mark.parametrize(
    "given",
    ["-XX:TieredStopAtLevel=1", "-XX:-TieredCompilation", "-XX:CompileThreshold=10", "-Xint", "-XX:Tier3DelayOn=2"],
)
def test_a_compiler_of_the_user(given: str) -> None:
    found = for_cores(given, 1)
    assert "Tier4" not in found
    assert "-XX:+UseSerialGC" in found.split()


@pytest.mark.parametrize(
    "given, fits",
    [
        ("", True),
        ("-Djava.io.tmpdir=/tmp -Da=b", True),
        (f"-Da=b -Djava.io.tmpdir=/{'x' * 62}", True),
        (f"-Djava.io.tmpdir=/{'x' * 64}", False),
        (f"-Djava.io.tmpdir=/{'ä' * 40}", False),
    ],
)
def test_a_long_folder_for_temporary_files_has_no_sockets(given: str, fits: bool) -> None:
    """Spark ended with "AF_UNIX path too long"."""
    assert _sockets_fit(given) is fits
