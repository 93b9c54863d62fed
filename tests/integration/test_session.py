"""The SparkSession: the connector works, our settings apply, and the user's settings win."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from onceflow import session as session_module
from onceflow.cli.main import cli
from onceflow.host import jars
from onceflow.host.jars import LOCAL_FS_MODULE
from onceflow.session import (
    LOCAL_FS_CLASS,
    _class_paths,
    _connector,
    defaults_for,
    parse_defaults,
    submit_settings,
)
from onceflow.spark import class_archive
from onceflow.spark.class_archive import archive_path, with_archive
from onceflow.spark.master import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.integration


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Class paths and defaults belong to a JVM, and there is one per Python process: hence another one."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_the_connector_is_there_and_our_settings_apply(onceflow_spark: SparkSession) -> None:
    frame = (
        onceflow_spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", "127.0.0.1:9")
        .option("subscribe", "deposits")
        .load()
    )
    assert frame.isStreaming
    assert "offset" in frame.columns
    assert onceflow_spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert onceflow_spark.conf.get("spark.hadoop.fs.file.impl") == LOCAL_FS_CLASS
    pool = onceflow_spark.sparkContext._jvm.org.apache.spark.sql.kafka010
    capacity = getattr(getattr(pool, "package$"), "MODULE$").CONSUMER_CACHE_CAPACITY()
    assert onceflow_spark.conf.get(capacity.key()) == "1000" != str(capacity.defaultValue().get())
    # An active session is handed back, not replaced.
    assert session_module(app_name="another").sparkContext is onceflow_spark.sparkContext


def test_records_come_out_of_a_real_topic(
    onceflow_spark: SparkSession, onceflow_broker: str, make_topic: object
) -> None:
    assert callable(make_topic)
    topic = make_topic("session", partitions=1)
    rows = onceflow_spark.createDataFrame([("a", "1"), ("b", "2")], "key string, value string")
    kafka = {"kafka.bootstrap.servers": onceflow_broker}
    rows.write.format("kafka").options(**kafka, topic=topic).save()
    found = onceflow_spark.read.format("kafka").options(**kafka, subscribe=topic).load()
    assert sorted(bytes(row.value) for row in found.collect()) == [b"1", b"2"]


@pytest.mark.long
def test_the_settings_of_the_user_win(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# mine\nspark.sql.shuffle.partitions 7\nspark.ui.showConsoleProgress=true\nspark.app.name filed\n"
    )
    answer = run_python(
        "import onceflow\n"
        "spark = onceflow.session(master='local[1]', config={'spark.sql.session.timeZone': 'Asia/Tokyo'})\n"
        "names = ['spark.sql.shuffle.partitions', 'spark.sql.session.timeZone', 'spark.app.name',\n"
        "         'spark.sql.execution.arrow.pyspark.enabled', 'spark.ui.showConsoleProgress',\n"
        "         'spark.master', 'spark.python.unix.domain.socket.enabled']\n"
        "print(*[spark.conf.get(name) for name in names])",
        SPARK_CONF_DIR=str(tmp_path),
        PYSPARK_SUBMIT_ARGS="--conf spark.sql.execution.arrow.pyspark.enabled=false pyspark-shell",
    )
    assert answer.stdout.split() == ["7", "Asia/Tokyo", "filed", "false", "true", "local[1]", "true"], answer.stderr


@pytest.mark.long
def test_spark_that_runs_without_the_connector_is_refused() -> None:
    """By ``session``; and by ``Flow.read`` before it asks any broker: there is none."""
    answer = run_python(
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "import onceflow\n"
        "flow = onceflow.Flow('any', spark, bootstrap_servers='127.0.0.1:9')\n"
        "for step in (onceflow.session, lambda: flow.read('deposits')):\n"
        "    try:\n"
        "        step()\n"
        "    except onceflow.EnvironmentUnusableError as error:\n"
        "        print(error)"
    )
    by_session, by_flow = answer.stdout.split("This Spark session has no usable Kafka connector [flow=any]\n")
    assert "without its Kafka connector" in by_session, answer.stderr
    assert "next step" in by_session
    assert "Failed to find data source: kafka" in by_flow
    assert "onceflow.session()" in by_flow
    version = jars.installed_spark_version()
    assert (
        f"the package org.apache.spark:spark-sql-kafka-0-10_{jars.scala_version()}:{version}, by --packages" in by_flow
    )


def test_without_java_it_says_so_before_spark_does(tmp_path: Path) -> None:
    answer = run_python(
        "import onceflow\n"
        "try:\n"
        "    onceflow.session()\n"
        "except onceflow.EnvironmentUnusableError as error:\n"
        "    print(error)",
        JAVA_HOME=str(tmp_path),
    )
    assert "has no bin/java" in answer.stdout, answer.stderr


def test_importing_the_package_loads_neither_spark_nor_arrow() -> None:
    answer = run_python(
        "import sys, onceflow, onceflow.cli.main, onceflow.testing, onceflow.testing.plugin\n"
        "print(sorted({'pyspark', 'pyarrow', 'kafka', 'confluent_kafka', 'numpy'} & set(sys.modules)))"
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_session_is_callable_however_it_was_imported() -> None:
    import onceflow

    assert callable(onceflow.session)
    assert callable(session_module)


@pytest.mark.parametrize(
    "master,cores",
    [("local", 1), ("local[3]", 3), ("local[2,4]", 2), ("local-cluster[2,1,1024]", None), ("yarn", None)],
)
def test_local_cores(master: str, cores: int | None) -> None:
    assert local_cores(master) == cores


def test_a_cluster_gets_no_setting_that_only_fits_one_machine() -> None:
    settings = defaults_for("yarn")
    assert "spark.driver.host" not in settings
    assert "spark.hadoop.fs.file.impl" not in settings
    assert "spark.sql.shuffle.partitions" not in settings
    for master in ("yarn", "spark://host:7077", "k8s://https://host:6443", "local-cluster[2,1,1024]"):
        assert "spark.ui.enabled" not in defaults_for(master)  # Spark's own default is true
    assert defaults_for("local[2]")["spark.ui.enabled"] == "false"


def test_unix_sockets_are_used_where_their_path_is_short() -> None:
    name = "spark.python.unix.domain.socket.enabled"
    assert defaults_for("spark://host:7077")[name] == "true"
    assert name not in defaults_for("yarn")  # java.io.tmpdir is in the container's folder


def test_a_cluster_gets_the_connector_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def brought(**user: str) -> list[str]:
        return [jar.name for jar in _connector({"spark.master": "spark://host:7077", **user})]

    names = brought()
    assert [name for name in names if name.startswith("spark-sql-kafka")]
    assert not [name for name in names if name.startswith(LOCAL_FS_MODULE)]
    assert [jar.name for jar in jars.spark_connector_jars() if jar.name.startswith(LOCAL_FS_MODULE)]
    assert brought(**{"spark.jars.packages": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"}) == []
    monkeypatch.setattr(jars, "spark_has_connector", lambda: True)  # as in deploy/Dockerfile
    assert brought() == []
    assert _class_paths({"spark.master": "spark://host:7077"}, []) == {}


def test_jars_for_a_submission() -> None:
    answer = CliRunner().invoke(cli, ["setup", "--jars"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.strip().split(",") == [str(jar) for jar in jars.cluster_jars()]


def test_settings_are_found_where_spark_takes_them_from() -> None:
    assert submit_settings("--master yarn --conf a.b=c=d -c e=f --jars=x.jar --verbose app.py") == {
        "spark.master": "yarn",
        "a.b": "c=d",
        "e": "f",
        "spark.jars": "x.jar",
    }
    assert parse_defaults("# no\nspark.a  1 2 \nspark.b=c\nspark.d: e\nother x\n") == {
        "spark.a": "1 2",
        "spark.b": "c",
        "spark.d": "e",
    }


def test_options_of_the_jvm_are_kept_and_an_archive_is_only_used_when_it_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = jars.spark_connector_jars()
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(jars, "spark_connector_jars", lambda: found)
    assert with_archive("-Xss4m") == "-Xss4m"
    archive = archive_path()
    archive.parent.mkdir()
    archive.touch()
    assert with_archive("-Xss4m").startswith(f"-Xss4m -XX:SharedArchiveFile={archive} ")
    assert with_archive("-Xshare:off") == "-Xshare:off"


def test_an_archive_is_not_looked_for_once_a_jar_of_spark_was_written_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when the virtual environment is made again at the same path. The JVM compares sizes and times of jars."""
    jar = tmp_path / f"spark-core_{jars.scala_version()}-{jars.installed_spark_version()}.jar"
    monkeypatch.setattr(jars, "spark_jars_folder", lambda: tmp_path)
    jar.write_bytes(b"jar")
    before = archive_path()
    assert archive_path() == before
    os.utime(jar, (1, 1))
    after = archive_path()
    assert after != before
    assert after.stem.rpartition("-")[0] == before.stem.rpartition("-")[0], "the old one is found and removed"


def test_with_a_local_master_the_connector_is_on_the_class_path_of_the_driver() -> None:
    """Jars of ``spark.jars`` are copied at each start, and their classes cannot come from the archive."""
    found = jars.spark_connector_jars()
    paths = _class_paths({"spark.master": "local[2]", "spark.driver.extraClassPath": "own.jar"}, found)
    assert "spark.jars" not in paths
    assert paths["spark.driver.extraClassPath"].split(":") == ["own.jar", *map(str, found)]
    users = _class_paths({"spark.master": "local[2]", "spark.jars": "x/spark-sql-kafka-0-10.jar"}, found)
    assert "spark.jars" not in users, "the user's stay as they are"
    assert all(LOCAL_FS_MODULE in Path(jar).name for jar in users["spark.driver.extraClassPath"].split(":"))
    on_cluster = _class_paths({"spark.master": "spark://host:7077", "spark.jars": "x.jar"}, found)
    assert on_cluster["spark.jars"].split(",") == ["x.jar", *map(str, found)]


def test_the_driver_of_a_cluster_has_the_class_path_that_its_archive_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = tmp_path / "archive.jsa"
    monkeypatch.setattr(class_archive, "archive_path", lambda: archive)
    master, connector = {"spark.master": "spark://host:7077"}, jars.cluster_jars()
    assert _class_paths(master, connector).keys() == {"spark.jars"}, "there is no archive"
    archive.touch()
    settings = _class_paths(master, connector)
    local = _class_paths({"spark.master": "local[2]"}, jars.spark_connector_jars())
    assert settings["spark.driver.extraClassPath"] == local["spark.driver.extraClassPath"]
    assert f"-XX:SharedArchiveFile={archive}" in settings["spark.driver.extraJavaOptions"]
    assert not [jar for jar in settings["spark.jars"].split(",") if LOCAL_FS_MODULE in jar]
    for own in ({"spark.driver.extraClassPath": "own.jar"}, {"spark.driver.extraJavaOptions": "-Xshare:off"}):
        assert _class_paths(master | own, connector).keys() == {"spark.jars"}, "it would not fit"


@pytest.mark.short_form
def test_a_start_changes_nothing_else_in_the_process() -> None:
    """Modules that are imported while the JVM starts have no effects of their own: pandas-on-Spark changes how pyarrow
    treats time zones."""
    answer = run_python(
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import onceflow\n"
        "onceflow.session(master='local[1]')\n"
        "changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}\n"
        "print(sorted(changed), 'pyspark.pandas' in sys.modules)"
    )
    assert answer.stdout.strip().endswith("False"), answer.stdout + answer.stderr
    assert "PYARROW_IGNORE_TIMEZONE" not in answer.stdout
    assert "SPARK_LAUNCHER_OPTS" not in answer.stdout


@pytest.mark.long
def test_the_archive_of_this_installation_fits() -> None:
    """The JVM ignores an archive that was made with another class path. With this option it does not start then."""
    archive = archive_path()
    assert archive.exists(), "onceflow setup makes it"
    answer = run_python(
        "import onceflow\n"
        f"options = '-XX:SharedArchiveFile={archive} -Xshare:on'\n"
        "spark = onceflow.session(master='local[1]', config={'spark.driver.extraJavaOptions': options})\n"
        "print(spark.range(3).count())"
    )
    assert answer.stdout.strip() == "3", answer.stderr


@pytest.mark.long
def test_an_archive_that_does_not_fit_is_ignored_in_silence(tmp_path: Path) -> None:
    archive = tmp_path / "wrong.jsa"
    archive.write_bytes(b"not an archive")
    answer = run_python(
        "from pathlib import Path\n"
        "import onceflow\n"
        "from onceflow.spark import class_archive\n"
        "class_archive.archive_path = lambda: Path(ARCHIVE)\n"
        "print(onceflow.session(master='local[1]').range(3).count())".replace("ARCHIVE", repr(str(archive)))
    )
    assert answer.stdout.strip() == "3", answer.stderr
    assert "shared" not in answer.stderr.lower()
