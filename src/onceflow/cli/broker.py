"""``onceflow broker``: start, stop and look at the local Apache Kafka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onceflow.broker.local import LocalBroker, default_data_dir

_data_dir = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where it keeps everything.  [default: $ONCEFLOW_HOME/broker or ~/.local/share/onceflow/broker]",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def broker() -> None:
    """A real Apache Kafka on this machine, on 127.0.0.1 only."""


@broker.command()
@_data_dir
@click.option("--port", type=click.IntRange(1, 65535), help="For clients.  [default: the last one, or a free one]")
@click.option("--version", help="Of Apache Kafka.  [default: the last one, or 4.3.1]")
@click.option("--heap", default="1g", show_default=True, help="Of its JVM.")
@_json
def start(data_dir: Path | None, port: int | None, version: str | None, heap: str, as_json: bool) -> int:
    """Start it and wait until it answers; does nothing when it runs already."""
    local = LocalBroker(data_dir, port=port, version=version, heap=heap)
    started = local.start()
    fields = {**local.status().as_json(), "started": started}
    what = "started" if started else "was running already"
    text = f"Kafka {fields['version']} {what}: {fields['bootstrap_servers']}"
    return _report(fields, text, as_json, holds=bool(fields["ready"]))


@broker.command()
@_data_dir
@_json
def stop(data_dir: Path | None, as_json: bool) -> int:
    """Stop it; does nothing when it does not run. The data stays."""
    local = LocalBroker(data_dir)
    stopped = local.stop()
    fields = {**local.status().as_json(), "stopped": stopped}
    text = "Kafka stopped" if stopped else f"Kafka was not running in {data_dir or default_data_dir()}"
    return _report(fields, text, as_json, holds=not fields["running"])


@broker.command()
@_data_dir
@_json
def status(data_dir: Path | None, as_json: bool) -> int:
    """Say whether it runs and answers; exit 1 when it does not."""
    fields = LocalBroker(data_dir).status().as_json()
    if fields["ready"]:
        text = f"Kafka {fields['version']} runs: {fields['bootstrap_servers']} (pid {fields['pids'][0]})"
    elif fields["running"]:
        text = f"Kafka runs (pid {fields['pids'][0]}) but does not answer; log: {fields['log_files'][0]}"
    else:
        text = f"Kafka is not running in {fields['data_dir']}; start it with `onceflow broker start`"
    return _report(fields, text, as_json, holds=bool(fields["ready"]))


def _report(fields: dict[str, Any], text: str, as_json: bool, *, holds: bool) -> int:
    click.echo(json.dumps(fields) if as_json else text)
    return 0 if holds else 1
