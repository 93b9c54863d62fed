"""Start Spark faster: a class-data archive for its JVM, made once by ``onceflow setup``.

The JVM spends half of the start of a Spark session on reading and checking some 15,000 classes. It can map them from
an archive that an earlier run has written (``-XX:ArchiveClassesAtExit``). The archive belongs to one Java, one Spark
and one class path. If any of them differs, the JVM ignores the archive, and the start is only slower.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from onceflow.errors import OnceflowError
from onceflow.host import jars
from onceflow.host.java import find_java, with_flags
from onceflow.host.private_folders import make_own

log = logging.getLogger(__name__)

TRAINING_TIMEOUT_S = 180

# Spark loads classes when features are used, so the training run uses what a flow uses: SQL, Python tasks, the Kafka
# connector, a streaming query, and SQL in the driver. It waits for the JVM, which writes the archive after the last
# Python line.
_TRAINING = """
import sys, onceflow
import pyarrow as pa
from pyspark import SparkContext
from onceflow.spark import plans
from onceflow.spark.collect import collect
from onceflow.spark.query_facts import facts_of
from onceflow.spark.row_program import RowPrograms
archive, checkpoint = sys.argv[1:]
flag = "-XX:ArchiveClassesAtExit=" + archive
spark = onceflow.session("onceflow-setup", "local[2]", {"spark.driver.extraJavaOptions": flag})
collect(spark.range(4).repartition(2).mapInArrow(lambda batches: batches, "id long"), interpreted=False)
options = {"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t"}
spark.readStream.format("kafka").options(**options).load().selectExpr("key", "value").schema
rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 4).load()
def write(frame, batch):
    collect(frame.selectExpr("cast(value as string) as value"), interpreted=False)
query = rate.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint).start()
while not query.lastProgress and query.isActive:
    query.awaitTermination(0.2)
query.stop()
rows = spark.createDataFrame([], "key binary, value binary, offset long, timestamp timestamp")
parsed = "from_json(string(value), 'a string, b long, c array<struct<d: double>>') AS j"
found = rows.selectExpr("key", parsed, "timestamp").where("j.b > 0 AND timestamp < current_timestamp()")
found = found.selectExpr("*", "explode(array(1)) AS n")
found = found.selectExpr("key", "to_json(struct(j.*, upper(j.a), date(timestamp), n)) AS value")
(leaf,) = [node for node in facts_of(found).root.nodes() if not node.children]
programs = RowPrograms(spark)
program = programs.evaluate(plans.analyzed(found), (), leaf.path)
given = [pa.array([b"k"]), pa.array([b'{"a": "x", "b": 1}']), None, pa.array([1], pa.timestamp("us", "UTC"))]
if [count for _, count in program.rows(given, 1)] != [1]:
    sys.exit("the program of rows gives other rows")
programs.close()
gateway = SparkContext._gateway
spark.stop()
gateway.proc.stdin.close()
sys.exit(gateway.proc.wait(120))
"""


def archive_path() -> Path:
    """Where the archive for this Java, this Spark and the class path is, or would be.

    The first hash in the name is the installation, the second is what the JVM compares: an archive does not fit once a
    jar was written anew, for example when the virtual environment was made again at the same path.
    """
    java = find_java().resolve()
    try:
        release = (java.parent.parent / "release").read_text(errors="replace")
    except OSError:
        release = ""
    spark = jars.installed_spark_version()
    written = [
        f"{jar} {jar.stat().st_size} {jar.stat().st_mtime_ns}"
        for jar in (*jars.spark_connector_jars(), *sorted(jars.spark_jars_folder().glob("*.jar")))
    ]
    place = _short_hash(f"{java}\n{sys.prefix}")
    class_path = _short_hash("\n".join((release, *written, _TRAINING)))
    return jars.cache_dir() / "class-archives" / f"spark-{spark}-{place}-{class_path}.jsa"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def java_flags() -> list[str]:
    """JVM flags that use the archive; none when there is no archive."""
    path = archive_path()
    # With an archive that does not fit the JVM is only slower. It must not print warnings into the user's output.
    return [f"-XX:SharedArchiveFile={path}", "-Xlog:disable", "-Xlog:all=error:stderr"] if path.exists() else []


def with_archive(options: str) -> str:
    """These JVM options and `java_flags`, unless they have an option for archives or JVM logging already."""
    if any(word in options for word in ("SharedArchiveFile", "ArchiveClassesAtExit", "-Xshare", "-Xlog")):
        return options
    return with_flags(options, java_flags())


def make_archive() -> Path | None:
    """Make the archive if there is none. Returns None when it cannot be made; then Spark only starts slower."""
    path = archive_path()
    if path.exists():
        return path
    make_own(path.parent)  # the JVM executes what is in it
    installation = path.stem.rpartition("-")[0]
    with tempfile.TemporaryDirectory(prefix=".training-", dir=path.parent) as scratch:
        made = Path(scratch, path.name)
        try:
            answer = subprocess.run(
                [sys.executable, "-c", _TRAINING, str(made), str(Path(scratch, "checkpoint"))],
                cwd=scratch,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRAINING_TIMEOUT_S,
                check=False,
            )
        except (OnceflowError, OSError, subprocess.TimeoutExpired) as error:
            log.info("no class archive: %s", error)
            return None
        if not made.exists():
            log.info("no class archive: %s", answer.stderr[-2000:])
            return None
        for unfit in path.parent.glob(f"{installation}-*.jsa"):
            unfit.unlink()
        made.chmod(0o644)
        made.replace(path)
    return path
