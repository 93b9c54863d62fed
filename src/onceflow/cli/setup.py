"""``onceflow setup``: downloads everything once, so that nothing needs the network later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console

from onceflow.cli.examples import examples
from onceflow.host import jars
from onceflow.host.java import find_java
from onceflow.spark import class_archive


@examples("onceflow setup")
@click.command()
@click.option(
    "--jars",
    "jars_only",
    is_flag=True,
    help="Download only Spark's Kafka connector, and print its jars for `spark-submit --jars`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: what was made, and where it is.")
def setup(jars_only: bool, as_json: bool) -> None:
    """Download the jars for Spark and for the local broker into the cache.

    Also prepares an archive of classes with which Spark starts faster.
    """
    if jars_only:
        found = [str(jar) for jar in jars.cluster_jars()]
        click.echo(json.dumps({"jars": found}) if as_json else ",".join(found))
        return
    console = Console(highlight=False, stderr=as_json)
    find_java()
    connector = f"Kafka connector for Spark {jars.installed_spark_version()}"
    broker = f"Apache Kafka {jars.BROKER_VERSION}"
    with ThreadPoolExecutor(1, "download") as beside:  # what tests need, while Spark is prepared
        downloading = beside.submit(_downloaded, broker, jars.kafka_broker_classpath, console)
        counts = {connector: _downloaded(connector, jars.spark_connector_jars, console)}
        archive = _archived(console)
        counts[broker] = downloading.result()
    console.print(f"cache: {jars.cache_dir()}", soft_wrap=True)
    if as_json:
        made_of = {"cache": str(jars.cache_dir()), "jars": counts, "archive": str(archive) if archive else None}
        click.echo(json.dumps(made_of))


def _downloaded(name: str, resolve: Callable[[], list[Path]], console: Console) -> int:
    """Download jars. Returns how many there are."""
    started = time.monotonic()
    console.print(f"{name}: downloading, unless it is in the cache ...")
    count = len(resolve())
    console.print(f"{name}: {count} jars, {time.monotonic() - started:.1f} s")
    return count


def _archived(console: Console) -> Path | None:
    started = time.monotonic()
    console.print("archive of Spark's classes: making it, unless it is in the cache ...")
    archive = class_archive.make_archive()
    made = f"{time.monotonic() - started:.1f} s" if archive else "not possible here, Spark starts slower"
    console.print(f"archive of Spark's classes: {made}")
    return archive
