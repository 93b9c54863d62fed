"""Jars: the cache, fallbacks and where they come from. Ivy itself is replaced by one that writes files."""

from __future__ import annotations

import io
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onceflow.cli import setup as command
from onceflow.errors import EnvironmentUnusableError
from onceflow.host import jars
from onceflow.host.jars import Coordinate


class FakeIvy:
    """A repository that has some coordinates, and counts how often it was asked."""

    def __init__(self, *has: str) -> None:
        self.has = set(has)
        self.calls = 0

    def __call__(
        self, jars_dir: Path, scratch: Path, coordinates: Sequence[Coordinate], *, transitive: bool
    ) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        missing = [c for c in coordinates if str(c) not in self.has]
        lines = [f":: {c.organisation}#{c.module};{c.revision}: not found" for c in missing]
        if not missing:
            jars_dir.mkdir()
            for c in coordinates:
                (jars_dir / f"{c.module}-{c.revision}.jar").write_bytes(b"jar")
        return subprocess.CompletedProcess([], 1 if missing else 0, "\n".join(lines))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ONCEFLOW_MAVEN_REPO", raising=False)
    return tmp_path / "cache"


def use(monkeypatch: pytest.MonkeyPatch, ivy: Any) -> Any:
    monkeypatch.setattr(jars, "_run_ivy", ivy)
    return ivy


def test_a_second_call_needs_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    ivy = use(monkeypatch, FakeIvy("g:a:1"))
    first = jars.resolve([Coordinate("g", "a", "1")], transitive=False)
    ivy.has.clear()
    assert jars.resolve([Coordinate("g", "a", "1")], transitive=False) == first
    assert [jar.name for jar in first] == ["a-1.jar"]
    assert ivy.calls == 1


def test_a_set_that_lost_a_jar_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ivy = use(monkeypatch, FakeIvy("g:a:1", "g:b:1"))
    wanted = [Coordinate("g", "a", "1"), Coordinate("g", "b", "1")]
    jars.resolve(wanted, transitive=False)[0].unlink()
    assert all(jar.is_file() for jar in jars.resolve(wanted, transitive=False))
    assert ivy.calls == 2


def test_a_fallback_revision_is_taken_only_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeIvy("g:a:2", "g:b:1"))
    found = jars.resolve([Coordinate("g", "a", "2", ("1",)), Coordinate("g", "b", "2", ("1",))], transitive=False)
    assert [jar.name for jar in found] == ["a-2.jar", "b-1.jar"]


def test_what_cannot_be_resolved_is_named_and_nothing_is_cached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    use(monkeypatch, FakeIvy("g:a:1"))
    with pytest.raises(EnvironmentUnusableError, match="g:b:1") as caught:
        jars.resolve([Coordinate("g", "a", "1"), Coordinate("g", "b", "1")], transitive=False)
    assert "onceflow setup" in caught.value.next_step
    assert [path.name for path in (cache / "jars").iterdir() if path.is_dir()] == []


def test_errors_do_not_show_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "Server access error at url https://me:secret@mirror.test/maven")

    use(monkeypatch, broken)
    with pytest.raises(EnvironmentUnusableError) as caught:
        jars.resolve([Coordinate("g", "a", "1")], transitive=False)
    assert "access error" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_threads_that_want_the_same_jars_download_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ivy = use(monkeypatch, FakeIvy("g:a:1"))
    results: list[list[Path]] = []
    threads = [
        threading.Thread(target=lambda: results.append(jars.resolve([Coordinate("g", "a", "1")], transitive=False)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert ivy.calls == 1


def test_keys_differ_by_coordinates_and_transitivity() -> None:
    one = [Coordinate("g", "a", "1")]
    keys = {
        jars.cache_key(one, transitive=True),
        jars.cache_key(one, transitive=False),
        jars.cache_key([*one, Coordinate("g", "b", "1")], transitive=False),
    }
    assert len(keys) == 3


def test_the_connector_falls_back_only_where_another_version_is_known_to_work() -> None:
    by_module = {c.module: c for c in jars.spark_connector_coordinates("4.2.0")}
    assert by_module["spark-sql-kafka-0-10_2.13"].fallbacks == ()
    assert by_module["spark-token-provider-kafka-0-10_2.13"].fallbacks == ("4.0.0",)
    assert by_module["kafka-clients"].fallbacks == ()


@pytest.mark.parametrize("version", ["4.1.0", "4.1.1", "4.1.2"])
def test_a_connector_with_a_mistake_is_not_taken_where_another_one_is_there(version: str) -> None:
    connector, provider, *_ = jars.spark_connector_coordinates(version)
    assert (connector.revision, connector.fallbacks) == ("4.1.3", (version,))
    assert provider.revision == version


@pytest.mark.parametrize(
    "version, connectors, token_providers",
    [
        ("3.5.9", ("3.5.7",), ("3.5.7",)),
        ("3.5.7", (), ()),
        ("4.0.1", (), ("4.0.0",)),
        ("4.1.4", ("4.1.3",), ("4.1.1", "4.0.0")),
        ("4.2.1", ("4.2.0",), ("4.2.0", "4.0.0")),
        ("9.9.9", (), ()),
    ],
)
def test_fallbacks_stay_in_the_minor_version(
    version: str, connectors: tuple[str, ...], token_providers: tuple[str, ...]
) -> None:
    connector, provider, *_ = jars.spark_connector_coordinates(version)
    assert (connector.revision, connector.fallbacks) == (version, connectors)
    assert (provider.revision, provider.fallbacks) == (version, token_providers)


def test_the_connector_is_of_the_scala_that_spark_was_built_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "spark" / "jars"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SPARK_HOME", str(folder.parent))
    with pytest.raises(EnvironmentUnusableError, match="no Spark in"):
        jars.scala_version()
    (folder / "spark-core_2.12-3.5.7.jar").touch()
    assert jars.scala_version() == "2.12"
    old = [c.module for c in jars.spark_connector_coordinates("3.5.7", jars.scala_version())]
    assert old[:2] == ["spark-sql-kafka-0-10_2.12", "spark-token-provider-kafka-0-10_2.12"]
    assert not any("parallel-collections" in module for module in old)
    new = [c.module for c in jars.spark_connector_coordinates("3.5.7", "2.13")]
    assert "scala-parallel-collections_2.13" in new


SETTINGS = """<settings xmlns="urn:example:settings"><mirrors>
  <mirror><id>other</id><url>http://localhost/other</url><mirrorOf>snapshots</mirrorOf></mirror>
  <mirror><id>all</id><url>http://localhost/all</url><mirrorOf>%s</mirrorOf></mirror>
</mirrors></settings>"""


@pytest.mark.parametrize("mirrored", ["*", "central", "external:*", "snapshots, central"])
def test_a_maven_mirror_is_used(tmp_path: Path, mirrored: str) -> None:
    settings = tmp_path / "home" / ".m2" / "settings.xml"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS % mirrored)
    assert jars.repository_root() == "http://localhost/all/"


def test_the_environment_variable_wins_over_the_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONCEFLOW_MAVEN_REPO", "file:///srv/maven")
    assert jars.repository_root() == "file:///srv/maven/"
    assert 'root="file:///srv/maven/"' in jars.ivy_settings("file:///srv/maven/")


def test_without_a_mirror_ivy_decides(tmp_path: Path) -> None:
    assert jars.repository_root() is None
    broken = tmp_path / "settings.xml"
    broken.write_text("<settings>")
    assert jars.maven_mirror(broken) is None


def test_setup_says_what_it_does_before_it_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    told: dict[str, str] = {}

    def step(name: str, result: Any) -> Callable[[], Any]:
        def take_long() -> Any:
            told[name] = output.getvalue()  # the broker's jars come beside the others, in any order
            return result

        return take_long

    monkeypatch.setattr(command, "find_java", lambda: None)
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=output, width=200))
    monkeypatch.setattr(jars, "installed_spark_version", lambda: "4.2.0")
    monkeypatch.setattr(jars, "spark_connector_jars", step("connector", [Path("a")]))
    monkeypatch.setattr(jars, "kafka_broker_classpath", step("broker", [Path("b"), Path("c")]))
    monkeypatch.setattr(command.class_archive, "make_archive", step("archive", None))
    command.setup.main([], standalone_mode=False)
    assert "Kafka connector for Spark 4.2.0: downloading, unless" in told["connector"]
    assert "Kafka connector for Spark 4.2.0: 1 jars" not in told["connector"]
    assert f"Apache Kafka {jars.BROKER_VERSION}: downloading, unless" in told["broker"]
    assert "archive of Spark's classes: making it, unless" in told["archive"]
    assert "Kafka connector for Spark 4.2.0: 1 jars" in told["archive"]
    assert f"Apache Kafka {jars.BROKER_VERSION}: 2 jars" in output.getvalue()
    assert "not possible here" in output.getvalue()


def test_make_says_what_it_does_before_each_long_step() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    recipes = re.findall(r"^\$\(\w*VENV\)/\.\w+:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    long = [recipe for recipe in recipes if "pip install" in recipe or "$(BIN)/onceflow setup" in recipe]
    assert len(long) == 3
    for recipe in long:
        assert recipe.startswith("\t@echo ")
