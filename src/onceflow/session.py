"""A SparkSession that can read and write Kafka, with settings that make small micro-batches fast.

Settings of the user always take precedence: those in ``config``, in spark-defaults.conf, in PYSPARK_SUBMIT_ARGS, and
in a JVM that is already running. Class paths can only be set before the JVM starts. So a JVM that is already running
without the Kafka connector is an error.
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
from onceflow.host.private_folders import scratch_folder
from onceflow.host.user import check_user
from onceflow.interactive import again
from onceflow.options.arguments import checked_arguments
from onceflow.spark import class_archive, jvm_options, logs, versions
from onceflow.spark.master import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

CONNECTOR_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
LOCAL_FS_CLASS = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"

DEFAULTS: Mapping[str, str] = {
    "spark.log.level": "WARN",
    # The progress bar would overwrite the output of the program.
    "spark.ui.showConsoleProgress": "false",
    # Makes Python tasks shorter: without a watchdog thread in the worker.
    "spark.python.worker.tracebackDumpIntervalSeconds": "0",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark keeps a consumer for every source partition. With as many as fit, by default 64, it closes idle ones before
    # each task, and opens new ones. That takes more time than to read the records.
    "spark.kafka.consumer.cache.capacity": "1000",
    # Every batch runs two plans, and Spark describes each for the UI before it starts: "formatted" takes milliseconds.
    "spark.sql.ui.explainMode": "simple",
    # For queries with state in Spark. The default store keeps all of it on the JVM's heap, and without the changelog
    # every commit uploads whole files.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}

# Makes Python tasks shorter: without TCP between JVM and worker. Not on YARN: the sockets are in java.io.tmpdir, which
# is a folder of the container there. Its path is longer than the 107 bytes that the address of a socket may have.
UNIX_SOCKETS: Mapping[str, str] = {"spark.python.unix.domain.socket.enabled": "true"}
_ADDRESS_MAX = 102 if sys.platform == "darwin" else 107
_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
_SOCKET_NAME = len("/.00000000-0000-0000-0000-000000000000.sock")

LOCAL_DEFAULTS: Mapping[str, str] = {
    # The UI takes start-up time and a port. On a cluster it stays on, because people and tools use it there.
    "spark.ui.enabled": "false",
    # The host name of a laptop may not resolve, or may resolve to an address that becomes invalid with a VPN.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

# Hadoop's local file system starts a `chmod` process for every file of a checkpoint, which takes 50 ms each. This class
# does not. It is used only with a local master: other executors would need the class on their own class path.
LOCAL_FS: Mapping[str, str] = {"spark.hadoop.fs.file.impl": LOCAL_FS_CLASS}
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"

# Arguments of spark-submit that have the same meaning as a setting.
_SUBMIT_FLAGS = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--jars": "spark.jars",
    "--packages": "spark.jars.packages",
    "--driver-class-path": "spark.driver.extraClassPath",
    "--driver-java-options": "spark.driver.extraJavaOptions",
    "--driver-memory": "spark.driver.memory",
}


@checked_arguments
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
            Spark is already running without the Kafka connector, or the user id has no entry in /etc/passwd.
    """
    versions.check()
    find_java()
    check_user()
    from onceflow.spark import driver_jvm, jvm_launch

    given = {key: str(value) for key, value in (config or {}).items()}
    if driver_jvm.has_context():
        _require_connector()
        # getOrCreate returns the active session, and applies only the given settings to it.
        return _get_or_create(given)

    class_path_open = not driver_jvm.is_started()
    if class_path_open:
        user = {**configured_settings(), **given}
    else:
        driver_jvm.started()
        _require_connector()
        user = {**driver_jvm.settings(), **given}
    if master is not None:
        user["spark.master"] = master
    user.setdefault("spark.master", "local[*]")
    user.setdefault("spark.app.name", app_name)
    if "spark.pyspark.python" not in user:
        # Workers must use this Python. Another one does not have onceflow, and Spark refuses another minor version.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    has_local_fs = class_path_open or driver_jvm.can_load(LOCAL_FS_CLASS)
    settings = {**defaults_for(user["spark.master"], local_fs=has_local_fs), **user}
    if not _sockets_fit(user.get("spark.driver.extraJavaOptions", ""), settings.get(_SOCKET_FOLDER)):
        settings = {name: value for name, value in settings.items() if name not in UNIX_SOCKETS or name in user}
    if not class_path_open:
        return _get_or_create(settings)
    settings.update(_class_paths(user, _connector(user)))
    logs.silence_py4j()
    jvm_launch.launch(settings)
    return _get_or_create(settings)


def defaults_for(master: str, *, local_fs: bool = True) -> dict[str, str]:
    """The default settings of ``session`` for a master, without class paths."""
    settings = dict(DEFAULTS)
    if master != "yarn":
        settings.update(UNIX_SOCKETS)
    cores = local_cores(master)
    if cores is not None:
        settings.update(LOCAL_DEFAULTS)
        # Whoever may write to a socket is heard: there is no secret. On other hosts the folder may not be there.
        settings[_SOCKET_FOLDER] = str(scratch_folder())
        # Spark's default of 200 is for a cluster. Here, each partition of a shuffle is one more task on the same cores.
        settings["spark.sql.shuffle.partitions"] = str(cores)
        if local_fs:
            settings.update(LOCAL_FS)
            settings[CHECKPOINT_FILES] = versions.streaming_class("FileSystemBasedCheckpointFileManager")
    return settings


def _sockets_fit(java_options: str, folder: str | None = None) -> bool:
    """Whether the name of the folder of sockets is not too long for their addresses.

    Args:
        java_options: they may name the JVM's folder for temporary files. folder: that of `_SOCKET_FOLDER`.
    """
    found = re.search(r"-Djava\.io\.tmpdir=(\S+)", java_options)
    folder = folder or (found and found[1])
    return folder is None or len(os.fsencode(folder)) + _SOCKET_NAME <= _ADDRESS_MAX


def submit_settings(arguments: str) -> dict[str, str]:
    """The settings in the value of PYSPARK_SUBMIT_ARGS, by the names of their properties."""
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
    """The settings in a spark-defaults.conf: key and value separated by space, ``=`` or ``:``."""
    settings = {}
    for line in text.splitlines():
        match = re.match(r"\s*(spark\.[^\s=:]+)(?:\s*[=:]\s*|\s+)(.*?)\s*$", line)
        if match:
            settings[match[1]] = match[2]
    return settings


def configured_settings() -> dict[str, str]:
    """The settings in spark-defaults.conf and in PYSPARK_SUBMIT_ARGS."""
    return {**_file_settings(), **submit_settings(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))}


def _conf_folder() -> Path:
    from onceflow.spark.driver_jvm import spark_home

    return Path(os.environ.get("SPARK_CONF_DIR") or Path(spark_home(), "conf"))


def _file_settings() -> dict[str, str]:
    try:
        return parse_defaults(Path(_conf_folder(), "spark-defaults.conf").read_text())
    except OSError:
        return {}


def _connector(user: Mapping[str, str]) -> list[Path]:
    """The jars to add. If the user or the cluster's Spark provides them, there are none, and the cache is not read."""
    if local_cores(user["spark.master"]) is not None:
        return jars.spark_connector_jars()
    return [] if _brings_connector(user) or jars.spark_has_connector() else jars.cluster_jars()


def _brings_connector(user: Mapping[str, str]) -> bool:
    return "spark-sql-kafka" in user.get("spark.jars", "") + user.get("spark.jars.packages", "")


def _class_paths(user: Mapping[str, str], connector: list[Path]) -> dict[str, str]:
    """spark.jars, the driver's class path and JVM options: the user's entries first, then ours.

    With a local master, what is on the class path of the driver goes before the user's ``spark.jars``.
    """
    paths = {}
    cores = local_cores(user["spark.master"])
    if cores is None:
        if connector and not _brings_connector(user):
            paths["spark.jars"] = ",".join(filter(None, [user.get("spark.jars"), *map(str, connector)]))
            paths |= _archive_of_a_cluster(user)
    else:
        # Tasks run in the driver's JVM. Jars of spark.jars would be copied first, each with a process that changes its
        # mode; their classes could not come from the archive; and they would be loaded too late for the file system.
        bare = [jar for jar in connector if jar.name.startswith(jars.LOCAL_FS_MODULE)]
        ours = [user.get("spark.driver.extraClassPath"), *map(str, bare if _brings_connector(user) else connector)]
        paths["spark.driver.extraClassPath"] = os.pathsep.join(filter(None, ours))
        level = user.get("spark.log.level", DEFAULTS["spark.log.level"])
        options = logs.with_settings(user.get("spark.driver.extraJavaOptions", ""), _conf_folder(), level)
        options = jvm_options.for_cores(class_archive.with_archive(options), cores)
        if options:
            paths["spark.driver.extraJavaOptions"] = options
    return paths


def _archive_of_a_cluster(user: Mapping[str, str]) -> dict[str, str]:
    """What lets the driver of a cluster use the archive of classes: the class path of a local master, for which it was
    made."""
    options = user.get("spark.driver.extraJavaOptions", "")
    with_archive = class_archive.with_archive(options)
    if with_archive == options or user.get("spark.driver.extraClassPath"):
        return {}
    connector = os.pathsep.join(map(str, jars.spark_connector_jars()))
    with_archive = jvm_options.for_cores(with_archive, os.cpu_count() or 1)
    return {"spark.driver.extraClassPath": connector, "spark.driver.extraJavaOptions": with_archive}


def _get_or_create(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder()  # as SparkSession.builder, but clearly a new object
    for key, value in settings.items():
        builder = builder.config(key, value)
    logs.silence_py4j()
    spark: SparkSession = builder.getOrCreate()
    logs.silence_py4j()  # the server of accumulators, too, which there is now
    return spark


def _require_connector() -> None:
    from onceflow.spark import driver_jvm

    if not driver_jvm.can_load(CONNECTOR_CLASS):
        connector = ",".join(
            map(str, jars.spark_connector_coordinates(jars.installed_spark_version(), jars.scala_version())[:1])
        )
        raise EnvironmentUnusableError(
            "Spark runs already, without its Kafka connector, and the class path of a running JVM cannot be changed.",
            next_step=f"{again()}create the session with onceflow.session() before anything else starts Spark, or "
            f"start Spark with --packages {connector}",
        )


class _CallableModule(types.ModuleType):
    # After an import of this module, `onceflow.session` may be the module instead of the function. Both must be
    # callable.
    def __call__(self, *args: Any, **kwargs: Any) -> SparkSession:
        return session(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
