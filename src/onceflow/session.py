"""A SparkSession that can read and write Kafka, with settings that make small micro-batches fast.

Settings of the user always take precedence: those in ``config``, in spark-defaults.conf, in PYSPARK_SUBMIT_ARGS, and
in a JVM that runs already. Class paths can only be set before the JVM starts. So a JVM that runs already, without the
Kafka connector, is an error.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import EnvironmentUnusableError
from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.interactive import again
from onceflow.spark import class_archive, logs, versions
from onceflow.spark.master import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

CONNECTOR_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
LOCAL_FS_CLASS = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"

DEFAULTS: Mapping[str, str] = {
    "spark.log.level": "WARN",
    # The progress bar writes over the output of the program.
    "spark.ui.showConsoleProgress": "false",
    # Shorter Python tasks: no watchdog thread in the worker.
    "spark.python.worker.tracebackDumpIntervalSeconds": "0",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Every batch runs two plans, and each is described for the UI before it starts: "formatted" takes milliseconds.
    "spark.sql.ui.explainMode": "simple",
    # For queries with Spark's own state. The default store keeps all of it on the JVM's heap, and without the
    # changelog every commit uploads whole files.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}

# Shorter Python tasks: no TCP between JVM and worker. Not on YARN: the sockets lie in java.io.tmpdir, which is a
# folder of the container there, and its path is longer than the 107 bytes that the address of a socket may have.
UNIX_SOCKETS: Mapping[str, str] = {"spark.python.unix.domain.socket.enabled": "true"}

LOCAL_DEFAULTS: Mapping[str, str] = {
    # It costs start-up time and a port. On a cluster people look at it, and so do their tools.
    "spark.ui.enabled": "false",
    # The host name of a laptop may not resolve, or resolve to an address that a VPN takes away.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

# Hadoop's local file system starts a `chmod` process for every file of a checkpoint: 50 ms each. This one
# does not. Only with a local master: executors elsewhere would need the class on their own class path.
LOCAL_FS: Mapping[str, str] = {"spark.hadoop.fs.file.impl": LOCAL_FS_CLASS}
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"

# spark-submit arguments that are settings under another name.
_SUBMIT_FLAGS = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--jars": "spark.jars",
    "--packages": "spark.jars.packages",
    "--driver-class-path": "spark.driver.extraClassPath",
    "--driver-java-options": "spark.driver.extraJavaOptions",
    "--driver-memory": "spark.driver.memory",
}


def session(
    app_name: str = "onceflow", master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """A SparkSession for onceflow. If a session is active, it is returned.

    Args:
        app_name: name of the application.
        master: the Spark master; None: what is configured, else ``local[*]``.
        config: your own settings; they take precedence over those that are set here.

    Raises:
        EnvironmentUnusableError: this version of Spark is not supported, there is no Java 17, a jar cannot be resolved,
            or Spark runs already without the Kafka connector.
    """
    versions.check()
    find_java()
    from onceflow.spark import driver_jvm

    given = {key: str(value) for key, value in (config or {}).items()}
    if driver_jvm.has_context():
        _require_connector()
        # getOrCreate hands back the active session and applies to it only what is given here.
        return _get_or_create(given)

    class_path_open = not driver_jvm.is_started()
    if class_path_open:
        user = {**_file_settings(), **submit_settings(os.environ.get("PYSPARK_SUBMIT_ARGS", "")), **given}
    else:
        driver_jvm.started()
        _require_connector()
        user = {**driver_jvm.settings(), **given}
    if master is not None:
        user["spark.master"] = master
    user.setdefault("spark.master", "local[*]")
    user.setdefault("spark.app.name", app_name)
    if "spark.pyspark.python" not in user:
        # Workers must be this Python: another one lacks our package, and Spark refuses another minor version.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    has_local_fs = class_path_open or driver_jvm.can_load(LOCAL_FS_CLASS)
    settings = {**defaults_for(user["spark.master"], local_fs=has_local_fs), **user}
    if class_path_open:
        settings.update(_class_paths(user, _connector(user)))
    return _get_or_create(settings)


def defaults_for(master: str, *, local_fs: bool = True) -> dict[str, str]:
    """The settings that ``session`` uses for a master, without class paths."""
    settings = dict(DEFAULTS)
    if master != "yarn":
        settings.update(UNIX_SOCKETS)
    cores = local_cores(master)
    if cores is not None:
        settings.update(LOCAL_DEFAULTS)
        # 200 is for a cluster; here every partition of a shuffle is one more task on the same few cores.
        settings["spark.sql.shuffle.partitions"] = str(cores)
        if local_fs:
            settings.update(LOCAL_FS)
            settings[CHECKPOINT_FILES] = versions.streaming_class("FileSystemBasedCheckpointFileManager")
    return settings


def submit_settings(arguments: str) -> dict[str, str]:
    """The settings in a PYSPARK_SUBMIT_ARGS, under their names as properties."""
    settings: dict[str, str] = {}
    words = iter(shlex.split(arguments))
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in ("--conf", "-c", *_SUBMIT_FLAGS):
            continue
        if not equals:
            value = next(words, "")
        if flag in _SUBMIT_FLAGS:
            settings[_SUBMIT_FLAGS[flag]] = value
        else:
            key, _, value = value.partition("=")
            settings[key] = value
    return settings


def parse_defaults(text: str) -> dict[str, str]:
    """The settings of a spark-defaults.conf: key and value separated by space, ``=`` or ``:``."""
    settings = {}
    for line in text.splitlines():
        match = re.match(r"\s*(spark\.[^\s=:]+)(?:\s*[=:]\s*|\s+)(.*?)\s*$", line)
        if match:
            settings[match[1]] = match[2]
    return settings


def _conf_folder() -> Path:
    from onceflow.spark.driver_jvm import spark_home

    return Path(os.environ.get("SPARK_CONF_DIR") or Path(spark_home(), "conf"))


def _file_settings() -> dict[str, str]:
    try:
        return parse_defaults(Path(_conf_folder(), "spark-defaults.conf").read_text())
    except OSError:
        return {}


def _connector(user: Mapping[str, str]) -> list[Path]:
    """The jars to add. There are none, and the cache is not read, if the user or the Spark of a cluster has them."""
    if local_cores(user["spark.master"]) is not None:
        return jars.spark_connector_jars()
    return [] if _brings_connector(user) or jars.spark_has_connector() else jars.cluster_jars()


def _brings_connector(user: Mapping[str, str]) -> bool:
    return "spark-sql-kafka" in user.get("spark.jars", "") + user.get("spark.jars.packages", "")


def _class_paths(user: Mapping[str, str], connector: list[Path]) -> dict[str, str]:
    """spark.jars, the driver's class path and JVM options: the user's entries first, then ours."""
    paths = {}
    if connector and not _brings_connector(user):
        paths["spark.jars"] = ",".join(filter(None, [user.get("spark.jars"), *map(str, connector)]))
    if local_cores(user["spark.master"]) is not None:
        # spark.jars come too late for the file system: Spark opens it while it reads them.
        bare = [str(jar) for jar in connector if jar.name.startswith(jars.LOCAL_FS_MODULE)]
        ours = [user.get("spark.driver.extraClassPath"), *bare]
        paths["spark.driver.extraClassPath"] = os.pathsep.join(filter(None, ours))
        level = user.get("spark.log.level", DEFAULTS["spark.log.level"])
        options = logs.with_settings(user.get("spark.driver.extraJavaOptions", ""), _conf_folder(), level)
        options = class_archive.with_archive(options)
        if options:
            paths["spark.driver.extraJavaOptions"] = options
    return paths


def _get_or_create(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder()  # SparkSession.builder would do, but says less about being a new one
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def _require_connector() -> None:
    from onceflow.spark import driver_jvm

    if not driver_jvm.can_load(CONNECTOR_CLASS):
        connector = ",".join(
            map(str, jars.spark_connector_coordinates(jars.installed_spark_version(), jars.scala_version())[:1])
        )
        raise EnvironmentUnusableError(
            "Spark runs already, without its Kafka connector, and a running JVM keeps its class path.",
            next_step=f"{again()}make the session with onceflow.session() before anything else starts Spark, or start "
            f"Spark with --packages {connector}",
        )


class _CallableModule(types.ModuleType):
    # `onceflow.session` names this module once it has been imported, and the function before; both must be
    # callable.
    def __call__(self, *args: Any, **kwargs: Any) -> SparkSession:
        return session(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
