"""Which schema registry a command asks: the options that these commands share, and values as JSON."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onceflow.schema_registry.client import RegistryClient
    from onceflow.schema_registry.json_view import JsonView
    from onceflow.state.api.record import Record

VARIABLE = "ONCEFLOW_SCHEMA_REGISTRY"


def address_options(registry: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``--registry``, with this help, and ``--registry-config``."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--registry-config",
            metavar="FILE",
            help="Settings of confluent-kafka's SchemaRegistryClient, in the properties format, for example "
            "basic.auth.user.info=USER:PASSWORD.",
        )(command)
        return click.option("--registry", metavar="URL", help=f"{registry}  [default: ${VARIABLE}]")(command)

    return add


def url_of(registry: str | None, config: str | None) -> str:
    """The URL of the registry; empty: there is none."""
    url = registry or os.environ.get(VARIABLE, "").strip()
    if config and not url:
        raise click.UsageError("--registry-config needs --registry")
    return url


def registry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a registry; it is called with ``view``, a `JsonView`; None: there is none."""

    @address_options("A schema registry: what begins with the id of one of its schemas is shown as JSON.")
    @functools.wraps(command)
    def with_view(*arguments: Any, registry: str | None, registry_config: str | None, **named: Any) -> Any:
        url = url_of(registry, registry_config)
        return command(*arguments, view=_view(url, registry_config) if url else None, **named)

    return with_view


def _view(url: str, config: str | None) -> JsonView:
    from onceflow.schema_registry.json_view import JsonView

    return JsonView(client_of(url, config))


def client_of(url: str, config: str | None, **options: Any) -> RegistryClient:
    """The client of a registry. Args: config: a file of properties. options: of `RegistryClient`."""
    from onceflow.client.properties import load_properties
    from onceflow.schema_registry.client import RegistryClient

    return RegistryClient(url, load_properties(config) if config else None, **options)


def with_schemas(view: JsonView | None, record: Record) -> Record:
    """The record, with its key and its value as JSON if they have schemas."""
    if view is None:
        return record
    from onceflow.schema_registry.wire_format import KEY_HEADER, VALUE_HEADER
    from onceflow.state.api.record import Record

    return Record(
        _shown(view, record, KEY_HEADER, record.key),
        _shown(view, record, VALUE_HEADER, record.value),
        topic=record.topic,
        headers=record.headers,
        timestamp_ms=record.timestamp_ms,
        partition=record.partition,
        offset=record.offset,
    )


def _shown(view: JsonView, record: Record, header: str, raw: bytes | None) -> bytes | None:
    from onceflow.admin.records.record_lines import JsonText
    from onceflow.protocol.headers import behind_header
    from onceflow.state.format import exact_json

    if raw is None:
        return None
    try:
        found, _ = view.read(behind_header(raw, record.headers, header))
        return JsonText(exact_json.written(found, ", ", ": ", ensure_ascii=False).encode())
    except ValueError:  # it has no schema, or other bytes
        return raw
