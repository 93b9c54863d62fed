"""Jars for Spark's Kafka connector and for the local broker. They are downloaded once and then used from a cache.

They are resolved with Ivy, which is part of pyspark, so nothing else has to be installed. The cache is
``$ONCEFLOW_CACHE`` or ``~/.cache/onceflow``. The folder ``jars/<key>/`` has one complete set of jars, and the file
``classpath`` that lists them in order. The key is computed from the requested coordinates. A set gets its name by an
atomic rename, so a set that exists is complete, and needs no network.

Jars come from the first of these: ``$ONCEFLOW_MAVEN_REPO`` (root URL of a Maven repository), a mirror of everything or
of ``central`` in ``~/.m2/settings.xml``, Ivy's default (the public Maven repository).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from onceflow.errors import EnvironmentUnusableError
from onceflow.host.file_lock import locked
from onceflow.host.java import find_java
from onceflow.host.private_folders import in_home, make_own, protect

log = logging.getLogger(__name__)

BROKER_VERSION = "4.3.1"
#: A requirement for pip. pyspark 4.3 exists, but has no Kafka connector yet.
SPARK_REQUIREMENT = "pyspark>=3.5,<4.3"
RESOLVE_TIMEOUT_S = 600
LOCAL_FS_MODULE = "hadoop-bare-naked-local-fs"


@dataclass(frozen=True)
class Coordinate:
    """One Maven module, with other revisions to try if the first one does not exist.

    Args:
        archive: classifier and extension of a file that the module has in place of a jar: ``all.tar.gz``.
    """

    organisation: str
    module: str
    revision: str
    fallbacks: tuple[str, ...] = ()
    archive: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (self.organisation, self.module, self.revision, self.archive)))


def cache_dir() -> Path:
    """``$ONCEFLOW_CACHE``, else ``~/.cache/onceflow``, see `in_home`."""
    given = os.environ.get("ONCEFLOW_CACHE")
    return Path(given).expanduser() if given else in_home(".cache", "onceflow")


# For each minor version of Spark, a release whose Kafka connector is known to work with all patch releases of it. It is
# used if a patch release has no connector of its own.
_CONNECTORS = {"3.5": "3.5.7", "4.0": "4.0.1", "4.1": "4.1.3", "4.2": "4.2.0"}
# With connectors before 4.1.3, a query ends after a batch that it has run again from its checkpoint (SPARK-57438).
_INSTEAD = dict.fromkeys(("4.1.0", "4.1.1", "4.1.2"), "4.1.3")
# The token provider does not exist in every version. Version 4.0.0 works with every connector of Spark 4.
_TOKEN_PROVIDERS = {"3.5": ("3.5.7",), "4.0": ("4.0.0",), "4.1": ("4.1.1", "4.0.0"), "4.2": ("4.2.0", "4.0.0")}


def spark_connector_coordinates(spark_version: str, scala: str = "2.13") -> list[Coordinate]:
    """The jars that Spark needs in addition to its own, to read Kafka, and to write checkpoints without subprocesses.

    Args:
        scala: the version of Scala that Spark was built with, ``2.12`` or ``2.13``.
    """
    minor = ".".join(spark_version.split(".")[:2])
    connectors = (_CONNECTORS[minor], spark_version) if minor in _CONNECTORS else ()
    coordinates = [
        Coordinate(
            "org.apache.spark",
            f"spark-sql-kafka-0-10_{scala}",
            _INSTEAD.get(spark_version, spark_version),
            connectors,
        ),
        Coordinate(
            "org.apache.spark",
            f"spark-token-provider-kafka-0-10_{scala}",
            spark_version,
            _TOKEN_PROVIDERS.get(minor, ()),
        ),
        # The same client for every version of Spark: that of Spark 4.2, which also works with older connectors.
        Coordinate("org.apache.kafka", "kafka-clients", "3.9.2"),
        Coordinate("org.apache.commons", "commons-pool2", "2.13.1"),
        # A local file system that sets permissions in the JVM. Hadoop's own starts a `chmod` process for every file.
        Coordinate("com.globalmentor", LOCAL_FS_MODULE, "0.1.0"),
    ]
    if scala != "2.12":  # in Scala 2.12 it is part of the standard library
        coordinates.insert(4, Coordinate("org.scala-lang.modules", f"scala-parallel-collections_{scala}", "1.2.0"))
    return [replace(c, fallbacks=tuple(f for f in c.fallbacks if f != c.revision)) for c in coordinates]


def spark_connector_jars() -> list[Path]:
    """The jars of the Kafka connector for the installed pyspark, without the jars that are part of Spark."""
    return resolve(spark_connector_coordinates(installed_spark_version(), scala_version()), transitive=False)


def cluster_jars() -> list[Path]:
    """As `spark_connector_jars`, but for a cluster: without the local file system, which is for local masters."""
    return [jar for jar in spark_connector_jars() if not jar.name.startswith(LOCAL_FS_MODULE)]


def spark_has_connector() -> bool:
    """Whether Spark's own jars include the Kafka connector, as in an image that was built with it."""
    return any(name.startswith("spark-sql-kafka-") for name in spark_jars())


def spark_jars() -> list[str]:
    """The names of Spark's own jars."""
    return sorted(jar.name for jar in spark_jars_folder().glob("*.jar"))


def kafka_broker_classpath(version: str = BROKER_VERSION) -> list[Path]:
    """The class path of an Apache Kafka broker of this version."""
    return resolve(
        [
            Coordinate("org.apache.kafka", "kafka_2.13", version),
            # Kafka's POM has no logging backend, and without one the broker logs nothing. This one is the
            # smallest.
            Coordinate("org.slf4j", "slf4j-simple", "1.7.36"),
        ],
        transitive=True,
    )


def installed_spark_version() -> str:
    """The version of the installed pyspark, which is not imported for this.

    Raises:
        EnvironmentUnusableError: pyspark is not installed.
    """
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        raise _no_pyspark() from None


def scala_version() -> str:
    """The version of Scala, ``2.12`` or ``2.13``, that the installed Spark was built with."""
    return _spark_core()[0]


def jars_version() -> str:
    """The version of Spark whose jars are used. It differs from that of pyspark if SPARK_HOME names another Spark."""
    return _spark_core()[1]


def spark_jars_folder() -> Path:
    """The folder of Spark's own jars: of ``SPARK_HOME`` if it is set, else of the installed pyspark."""
    home = os.environ.get("SPARK_HOME")
    if home:
        return Path(home, "jars")
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise _no_pyspark()
    return Path(next(iter(spec.submodule_search_locations)), "jars")


def _spark_core() -> tuple[str, str]:
    """The versions of Scala and Spark in the name of Spark's main jar."""
    for jar in spark_jars_folder().glob("spark-core_*.jar"):
        match = re.match(r"spark-core_(\d+\.\d+)-(.+)\.jar", jar.name)
        if match:
            return match[1], match[2]
    raise EnvironmentUnusableError(
        f"There is no Spark in {spark_jars_folder()}.", next_step="Install pyspark again, or correct SPARK_HOME."
    )


def resolve(coordinates: Sequence[Coordinate], *, transitive: bool) -> list[Path]:
    """The jars for these coordinates, from the cache. They are downloaded from a Maven repository if necessary.

    Raises:
        EnvironmentUnusableError: a module cannot be found or downloaded.
    """
    key = cache_key(coordinates, transitive=transitive)
    home = cache_dir() / "jars"
    cached = _read_set(home / key)
    if cached is not None:
        return cached
    make_own(home)  # the JVM executes what is in it
    with _locked(home / f"{key}.lock"):
        cached = _read_set(home / key)  # another process may have downloaded it meanwhile
        if cached is not None:
            return cached
        names = ", ".join(f"{c.module} {c.revision}" for c in coordinates)
        log.warning("downloading %s and their dependencies, once", names)
        started = time.monotonic()
        _make_set(home / key, coordinates, transitive=transitive)
        jars = _read_set(home / key)
        if jars is None:
            raise EnvironmentUnusableError(
                f"The jars of {names} disappeared from {home} right after they were put there.",
                next_step="Check whether a program cleans that folder, or set ONCEFLOW_CACHE to another one.",
            )
        log.info("%d jars in %.1f s", len(jars), time.monotonic() - started)
        return jars


def cached(coordinates: Sequence[Coordinate]) -> list[Path] | None:
    """These jars, without their dependencies, if they are in the cache. None: `resolve` would download them."""
    return _read_set(cache_dir() / "jars" / cache_key(coordinates, transitive=False))


def cache_key(coordinates: Sequence[Coordinate], *, transitive: bool) -> str:
    """Name of the folder for these coordinates. It is readable, and unique because of a digest."""
    text = "\n".join([*map(str, coordinates), f"transitive={transitive}"])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{coordinates[0].module}-{coordinates[0].revision}-{digest}"


def _no_pyspark() -> EnvironmentUnusableError:
    return EnvironmentUnusableError("pyspark is not installed.", next_step=f"pip install '{SPARK_REQUIREMENT}'")


def _read_set(folder: Path) -> list[Path] | None:
    """The jars of a cached set. None: there is no such set, or some of its jars were removed."""
    try:
        names = (folder / "classpath").read_text().splitlines()
    except OSError:
        return None
    jars = [folder / name for name in names]
    return jars if jars and all(jar.is_file() for jar in jars) else None


def _make_set(folder: Path, coordinates: Sequence[Coordinate], *, transitive: bool) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        jars_dir = scratch / "set"
        _retrieve(jars_dir, scratch, coordinates, transitive=transitive)
        names = sorted(path.name for path in jars_dir.iterdir())
        (jars_dir / "classpath").write_text("".join(f"{name}\n" for name in names))
        protect(jars_dir)
        if folder.exists():  # it is incomplete: _read_set returned None, under the same lock
            shutil.rmtree(folder)
        jars_dir.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _retrieve(jars_dir: Path, scratch: Path, coordinates: Sequence[Coordinate], *, transitive: bool) -> None:
    """Run Ivy, again and again with fallback revisions for the modules that it did not find, until it finds all."""
    wanted = list(coordinates)
    while True:
        answer = _run_ivy(jars_dir, scratch, wanted, transitive=transitive)
        if answer.returncode == 0 and any(jars_dir.glob("*")):
            return
        missing = set(re.findall(r"(\S+?)#(\S+?);(\S+?): not found", answer.stdout))
        again = [
            replace(c, revision=c.fallbacks[0], fallbacks=c.fallbacks[1:])
            if c.fallbacks and (c.organisation, c.module, c.revision) in missing
            else c
            for c in wanted
        ]
        if again == wanted:
            raise _unresolved(wanted, missing, answer.stdout)
        for before, after in zip(wanted, again, strict=True):
            if before != after:
                log.info("%s was not found, trying %s", before, after.revision)
        wanted = again


def _run_ivy(
    jars_dir: Path, scratch: Path, coordinates: Sequence[Coordinate], *, transitive: bool
) -> subprocess.CompletedProcess[str]:
    ivy_file = scratch / "ivy.xml"
    ivy_file.write_text(ivy_module(coordinates, transitive=transitive))
    command = [str(find_java()), "-XX:TieredStopAtLevel=1", "-cp", str(_ivy_jar()), "org.apache.ivy.Main"]
    root = repository_root()
    if root is not None:
        settings = scratch / "ivysettings.xml"
        settings.write_text(ivy_settings(root))
        command += ["-settings", str(settings)]
    # Ivy locks the files of its own cache, so each set gets its own Ivy cache. Then sets do not block each other.
    command += ["-cache", str(scratch / "cache"), "-ivy", str(ivy_file), "-confs", "default"]
    command += ["-retrieve", f"{jars_dir}/[artifact](-[classifier])-[revision].[ext]"]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RESOLVE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusableError(
            f"Downloading jars took longer than {RESOLVE_TIMEOUT_S} s.", next_step=_NEXT_STEP
        ) from None


def ivy_module(coordinates: Sequence[Coordinate], *, transitive: bool) -> str:
    """An ivy.xml with these dependencies. ``default`` of a POM is its jar and the runtime dependencies."""
    flag = str(transitive).lower()
    dependencies = "".join(
        f"<dependency org={quoteattr(c.organisation)} name={quoteattr(c.module)} rev={quoteattr(c.revision)} "
        f'transitive="{flag}" conf="default-&gt;default">{_artifact(c)}</dependency>'
        for c in coordinates
    )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="onceflow" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )


def _artifact(coordinate: Coordinate) -> str:
    classifier, _, extension = coordinate.archive.partition(".")
    kind = quoteattr(extension)
    return (
        f"<artifact name={quoteattr(coordinate.module)} type={kind} ext={kind} m:classifier={quoteattr(classifier)}/>"
        if extension
        else ""
    )


def ivy_settings(root: str) -> str:
    """An ivysettings.xml whose only repository is the Maven repository at ``root``."""
    return (
        '<ivysettings><settings defaultResolver="maven"/><resolvers>'
        f'<ibiblio name="maven" m2compatible="true" root={quoteattr(root)}/>'
        "</resolvers></ivysettings>"
    )


def repository_root() -> str | None:
    """The Maven repository that the user has configured, or None for Ivy's default."""
    given = os.environ.get("ONCEFLOW_MAVEN_REPO", "").strip()
    if given:
        return given.rstrip("/") + "/"
    try:
        return maven_mirror(Path.home() / ".m2" / "settings.xml")
    except RuntimeError:  # there is no home
        return None


def maven_mirror(settings: Path) -> str | None:
    """URL of the mirror of ``*`` or ``central`` in a Maven settings file, or None."""
    try:
        tree = ElementTree.parse(settings)
    except (OSError, ElementTree.ParseError):
        return None
    for mirror in tree.iter():
        if _local_name(mirror.tag) != "mirror":
            continue
        fields = {_local_name(field.tag): (field.text or "").strip() for field in mirror}
        mirrored = [name.strip() for name in fields.get("mirrorOf", "").split(",")]
        if fields.get("url") and any(name in ("*", "central", "external:*") for name in mirrored):
            return fields["url"].rstrip("/") + "/"
    return None


def _local_name(tag: str) -> str:
    return tag.rpartition("}")[2]


def _ivy_jar() -> Path:
    folder = spark_jars_folder()
    jars = sorted(folder.glob("ivy-*.jar"))
    if not jars:
        raise EnvironmentUnusableError(
            f"There is no Ivy in {folder}.", next_step="Install pyspark again: this one is incomplete."
        )
    return jars[-1]


_NEXT_STEP = (
    "Check whether this machine reaches a Maven repository. To use a mirror, set ONCEFLOW_MAVEN_REPO to its "
    "URL (or use ~/.m2/settings.xml); behind a proxy, set JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=...; then "
    "run `onceflow setup`."
)


def _unresolved(
    wanted: Sequence[Coordinate], missing: set[tuple[str, str, str]], output: str
) -> EnvironmentUnusableError:
    names = [":".join(module) for module in sorted(missing)] or [str(c) for c in wanted]
    lines = [line.strip(": \t") for line in output.splitlines() if line.strip(": \t")]
    errors = [
        line for line in lines if re.search(r"error at|exception|failed|refused|unknown host", line, re.IGNORECASE)
    ]
    # URLs are removed: the URL of a repository may contain a password.
    detail = re.sub(r"\w+://\S+", "<url>", "; ".join(dict.fromkeys(errors or lines[-3:])))[:600]
    return EnvironmentUnusableError(
        f"These jars could not be resolved: {', '.join(names)}.", detail=detail, next_step=_NEXT_STEP
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that processes that need the same jars wait for one download."""
    with locked(
        path,
        RESOLVE_TIMEOUT_S,
        busy=f"Another process has held {path} for {RESOLVE_TIMEOUT_S} s.",
        next_step="Find the process that downloads jars, and stop it if it hangs.",
    ):
        yield
