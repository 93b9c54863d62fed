"""``onceflow setup``: downloads everything once, so that nothing needs the network later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.spark import class_archive


@click.command()
@click.option(
    "--jars",
    "jars_only",
    is_flag=True,
    help="Download only Spark's Kafka connector, and print its jars for `spark-submit --jars`.",
)
def setup(jars_only: bool) -> None:
    """Download the jars for Spark and for the local broker into the cache.

    Also prepares an archive of classes with which Spark starts faster.
    """
    if jars_only:
        click.echo(",".join(map(str, jars.cluster_jars())))
        return
    console = Console(highlight=False)
    find_java()
    steps: list[tuple[str, Callable[[], list[Path]]]] = [
        (f"Kafka connector for Spark {jars.installed_spark_version()}", jars.spark_connector_jars),
        (f"Apache Kafka {jars.BROKER_VERSION}", jars.kafka_broker_classpath),
    ]
    for name, resolve in steps:
        started = time.monotonic()
        with console.status(f"{name}: downloading (once) ..."):
            found = resolve()
        console.print(f"{name}: {len(found)} jars, {time.monotonic() - started:.1f} s")
    started = time.monotonic()
    with console.status("archive of Spark's classes: making it (once) ..."):
        archive = class_archive.make_archive()
    made = f"{time.monotonic() - started:.1f} s" if archive else "not possible here, Spark starts slower"
    console.print(f"archive of Spark's classes: {made}")
    console.print(f"cache: {jars.cache_dir()}", soft_wrap=True)
