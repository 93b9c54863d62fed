"""``onceflow broker``: start, stop and look at the local Apache Kafka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onceflow.broker.local import HEAP, HEAP_OF_SEVERAL, LocalBroker, default_data_dir
from onceflow.broker.nodes import TRANSACTION_VERSION
from onceflow.cli.examples import examples

_data_dir = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="The folder of the cluster's data, logs and configuration.  "
    "[default: $ONCEFLOW_HOME/broker or ~/.local/share/onceflow/broker]",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@click.group()
def broker() -> None:
    """Run a real Apache Kafka on this machine, on 127.0.0.1 only."""


@examples("onceflow broker start --nodes 3")
@broker.command()
@_data_dir
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="How many brokers. With 3, every topic has 3 copies and one broker may fail.  [default: as before, or 1]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="The port for clients. Further nodes use the ports after it.  [default: as before, or a free one]",
)
@click.option("--version", help="The version of Apache Kafka, for example 3.9.2.  [default: as before, or 4.3.1]")
@click.option(
    "--transaction-version",
    type=click.IntRange(0, 2),
    help="The transaction.version of a new cluster.  [default: the newest that this version of Kafka has]",
)
@click.option("--heap", help=f"The heap of each node's JVM.  [default: {HEAP}, with several nodes {HEAP_OF_SEVERAL}]")
@_json
def start(
    data_dir: Path | None,
    nodes: int | None,
    port: int | None,
    version: str | None,
    transaction_version: int | None,
    heap: str | None,
    as_json: bool,
) -> int:
    """Start Kafka and wait until it answers.

    When it runs already, only the nodes that are down are started.
    """
    features = {} if transaction_version is None else {TRANSACTION_VERSION: transaction_version}
    local = LocalBroker(data_dir, port=port, version=version, heap=heap, nodes=nodes, features=features)
    started = local.start()
    fields = {**local.status().as_json(), "started": started}
    what = "started" if started else "was running already"
    text = f"Kafka {fields['version']} {what}: {fields['bootstrap_servers']}"
    return _report(fields, text, as_json, holds=bool(fields["ready"]))


@examples("onceflow broker stop")
@broker.command()
@_data_dir
@_json
def stop(data_dir: Path | None, as_json: bool) -> int:
    """Stop all nodes of Kafka. The data stays."""
    local = LocalBroker(data_dir)
    stopped = local.stop()
    fields = {**local.status().as_json(), "stopped": stopped}
    text = "Kafka stopped" if stopped else f"Kafka was not running in {data_dir or default_data_dir()}"
    return _report(fields, text, as_json, holds=not fields["pids"])


@examples("onceflow broker status --json")
@broker.command()
@_data_dir
@_json
def status(data_dir: Path | None, as_json: bool) -> int:
    """Show whether all nodes of Kafka run and answer. The exit code is 1 when they do not."""
    fields = LocalBroker(data_dir).status().as_json()
    pids = f"pid {', '.join(map(str, fields['pids']))}"
    command = "onceflow broker start" + ("" if data_dir is None else f" --data-dir {data_dir}")
    if fields["ready"]:
        text = f"Kafka {fields['version']} runs: {fields['bootstrap_servers']} ({pids})"
    elif fields["running"]:
        text = f"Kafka runs ({pids}) but does not answer; log: {', '.join(fields['log_files'])}"
    elif fields["pids"]:
        down = ", ".join(str(node["node_id"]) for node in fields["nodes"] if node["pid"] is None)
        text = f"Kafka runs ({pids}) without node {down}; start it with `{command}`"
    else:
        text = f"Kafka is not running in {fields['data_dir']}; start it with `{command}`"
    return _report(fields, text, as_json, holds=bool(fields["ready"]))


def _report(fields: dict[str, Any], text: str, as_json: bool, *, holds: bool) -> int:
    click.echo(json.dumps(fields) if as_json else text)
    return 0 if holds else 1
