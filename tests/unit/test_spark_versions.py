"""Which versions of Spark are taken, and what is done where one lacks something. Spark itself is in other tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from onceflow.errors import EnvironmentUnusableError
from onceflow.host.jars import SPARK_REQUIREMENT, installed_spark_version
from onceflow.spark import task_shuffle, versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def has_distutils(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Python 3.11: from 3.12 on, Spark 3.5 is refused without a module of that name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("version", ["3.5.0", "4.0.1", "4.1.1", "4.2.0", "4.2.1", "4.1.2-amzn-0", "4.0.0.dev1"])
@pytest.mark.usefixtures("has_distutils")
def test_supported(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["2.4.8", "3.4.4", "3.6.0", "4.3.0", "5.0.0", "33.5.1", "unknown"])
def test_what_is_not_supported_is_refused_with_the_versions_that_are(version: str) -> None:
    with pytest.raises(EnvironmentUnusableError) as caught:
        versions.check(version)
    assert caught.value.what == f"Spark {version} is not supported"
    assert caught.value.detail == "onceflow runs on Spark 3.5, 4.0, 4.1 and 4.2"
    assert SPARK_REQUIREMENT in caught.value.next_step


def test_spark_3_5_needs_a_module_that_newer_pythons_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnusableError, match="distutils"):
        versions.check("3.5.7")
    versions.check("4.0.0")


def test_session_and_flow_refuse_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import onceflow

    monkeypatch.setattr(versions, "installed_spark_version", lambda: "3.4.4")
    with pytest.raises(EnvironmentUnusableError, match=r"Spark 3\.4\.4 is not supported"):
        onceflow.session()

    class Session:
        _jsparkSession = None
        version = "3.3.1"

    spark: Any = Session()
    with pytest.raises(EnvironmentUnusableError, match=r"Spark 3\.3\.1 is not supported"):
        onceflow.Flow("any", spark, bootstrap_servers="127.0.0.1:9")


def test_a_pyspark_that_is_too_old_to_import_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    import onceflow

    monkeypatch.setattr(versions, "installed_spark_version", lambda: "3.3.4")
    monkeypatch.delitem(vars(onceflow), "Flow", raising=False)

    def lacking(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'pyspark.errors'")

    monkeypatch.setattr(onceflow.importlib, "import_module", lacking)
    with pytest.raises(EnvironmentUnusableError, match=r"Spark 3\.3\.4 is not supported"):
        _ = onceflow.Flow
    monkeypatch.setattr(versions, "installed_spark_version", lambda: "4.2.0")
    with pytest.raises(ModuleNotFoundError):
        _ = onceflow.Flow


@pytest.mark.usefixtures("has_distutils")
def test_pyspark_and_its_jvm_are_of_one_version() -> None:
    versions.check_running(installed_spark_version())
    others = [version for version in versions.SUPPORTED if version != versions.current()]
    for major, minor in others:
        with pytest.raises(EnvironmentUnusableError, match=r"which is another version(.|\n)*SPARK_HOME"):
            versions.check_running(f"{major}.{minor}.0")


def test_package_metadata_pins_and_code_say_the_same() -> None:
    assert f'    "{SPARK_REQUIREMENT}",\n' in (ROOT / "pyproject.toml").read_text()
    allowed = Requirement(SPARK_REQUIREMENT).specifier
    for major, minor in versions.SUPPORTED:
        pinned = (ROOT / "requirements" / f"spark-{major}.{minor}.txt").read_text()
        (version,) = [line.split()[0].partition("==")[2] for line in pinned.splitlines() if line.startswith("pyspark=")]
        assert versions.parsed(version) == (major, minor)
        assert version in allowed
    for version in ("3.4.4", "4.3.0"):
        assert version not in allowed


def test_every_feature_is_in_some_supported_version_and_not_in_all() -> None:
    """A feature that all supported versions have needs no name any more."""
    for name, since in {**versions._SINCE, **versions.QUERY_SINCE}.items():
        assert since in versions.SUPPORTED, name
        assert since > versions.SUPPORTED[0], name


def test_a_query_that_only_newer_versions_have_is_refused_with_the_version() -> None:
    error = versions.refuse("transformWithState", "orders")
    assert (
        error.what == f"Spark {installed_spark_version()} has no transformWithState in Python; it came with Spark 4.1"
    )
    assert error.flow == "orders"
    assert "Spark 4.1 or later" in error.next_step


def murmur3(value: int, seed: int = 42) -> int:
    """Spark's hash of an integer, written from the description of MurmurHash3_x86_32."""
    bits = 0xFFFFFFFF
    k = (value & bits) * 0xCC9E2D51 & bits
    k = (k << 15 | k >> 17) & bits
    h = seed ^ (k * 0x1B873593 & bits)
    h = ((h << 13 | h >> 19) & bits) * 5 + 0xE6546B64 & bits
    h ^= 4
    h = (h ^ h >> 16) * 0x85EBCA6B & bits
    h = (h ^ h >> 13) * 0xC2B2AE35 & bits
    return h ^ h >> 16


def test_keys_that_spark_hashes_to_a_task() -> None:
    for task in (*range(2000), (1 << 31) - 1):
        key = task_shuffle.key_of_task(task)
        assert -(1 << 31) <= key < 1 << 31
        assert murmur3(key) == task  # so the remainder by any larger number of tasks is the task
