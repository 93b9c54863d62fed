"""``onceflow table serve``: the query server."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.registry import address_options, client_of, url_of
from onceflow.cli.table_lookup import naming_state_dir
from onceflow.cli.text import timeout_ms
from onceflow.errors import EnvironmentUnusableError
from onceflow.logs import json_logs

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings
    from onceflow.server.schema_values import SchemaValues

_TOKENS_VARIABLE, _SECRETS_VARIABLE = "ONCEFLOW_SERVER_TOKENS", "ONCEFLOW_PEER_SECRETS"


@examples("onceflow table serve balances customers,value=text --port 8790")
@click.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@connection
@click.option("--key", default="text", show_default=True, help="How clients write keys: text, long or base64.")
@click.option(
    "--value", default="json", show_default=True, help="How clients get values: json, text, base64 or schema."
)
@address_options("The schema registry of tables with --value schema: values are given as JSON.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8790, show_default=True, help="0: any free port.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Requests must carry one of these bearer tokens, one in each line.  [default: ${_TOKENS_VARIABLE}, "
    "separated by spaces; without any, everybody may ask]",
)
@click.option("--tls-certificate", type=click.Path(exists=True, path_type=Path), help="PEM file with the certificate.")
@click.option("--tls-key", type=click.Path(exists=True, path_type=Path), help="PEM file with its key.")
@click.option("--instances", metavar="GROUP", help="Share the tables with others that name this consumer group.")
@click.option(
    "--peer-secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --instances: by this secret instances recognise each other. Several lines: the first one is used, all "
    f"are accepted.  [default: ${_SECRETS_VARIABLE}, separated by spaces]",
)
@click.option(
    "--copies", type=click.IntRange(min=1), default=1, show_default=True, help="Instances with each partition."
)
@click.option("--advertise", metavar="URL", default="", help="Where others reach this one.  [default: host and port]")
@click.option("--session-timeout", metavar="DURATION", help="Until one that died is replaced.  [default: 10 seconds]")
@click.option(
    "--tls-authority",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file of authorities for the certificates of other instances.  [default: those of the system]",
)
@click.option("--store", default="lmdb", show_default=True, help="Where copies are: lmdb, memory or rocksdb.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder for local copies.  [default: that of Table]")
@click.option("--max-requests", type=click.IntRange(min=1), help="Requests at the same time.  [default: 1000]")
@click.option("--max-streams", type=click.IntRange(min=0), help="Streams at the same time.  [default: 64]")
@click.option("--request-timeout", metavar="DURATION", help="Until an answer begins.  [default: 30 seconds]")
@click.option("--access-log/--no-access-log", default=True, show_default=True, help="Log each request.")
def serve(tables: tuple[str, ...], settings: ClientSettings, **given: Any) -> None:
    """Answer lookups in each TABLE, a compacted topic, over HTTP. The OpenAPI page is at /docs.

    TABLE may have formats of its own: TOPIC,key=long,value=text. The server answers while it restores its copies; every
    answer says how old it is. SIGTERM or Ctrl-C ends it when running requests are answered.
    """
    check_packages()
    from onceflow.server.process import QueryServer, more_files

    options = _options(tables, settings, given)
    _log()
    if options.public and not options.tokens:
        click.echo("onceflow: everybody who reaches this address may ask; --token-file limits that", err=True)
    more_files(options.limits.connections + 1_000)
    server = QueryServer(options)
    with naming_state_dir(options.state_dir):
        server.open()
    # What is there now stays. Without this, a look through all of it would hold up requests for 0.1 s now and then.
    gc.collect()
    gc.freeze()
    click.echo(f"Serving {', '.join(options.tables)} at {server.url} (OpenAPI page: {server.url}/docs)")
    server.run()


def _options(tables: tuple[str, ...], settings: ClientSettings, given: dict[str, Any]) -> Any:
    from onceflow.server.options import Limits, ServeOptions

    named = {name: given[f"max_{name}"] for name in ("requests", "streams") if given[f"max_{name}"] is not None}
    if given["request_timeout"] is not None:
        named["request_s"] = timeout_ms(given["request_timeout"], "--request-timeout") / 1000
    if (given["tls_certificate"] is None) != (given["tls_key"] is None):
        raise click.UsageError("--tls-certificate and --tls-key belong together")
    session = given["session_timeout"]
    schemas = _schemas(given["registry"], given["registry_config"])
    named_tables = [_table(text, given["key"], given["value"], schemas) for text in tables]
    if given["registry"] and not any(each.values.schemas for _, each in named_tables):
        raise click.UsageError("--registry is given, but no table has --value schema, or value=schema of its own")
    topics = [topic for topic, _ in named_tables]
    if twice := next((topic for topic in topics if topics.count(topic) > 1), None):
        raise click.UsageError(f"table {twice} is given twice")
    return ServeOptions(
        session_s=ServeOptions.session_s if session is None else timeout_ms(session, "--session-timeout") / 1000,
        tables=dict(named_tables),
        settings=settings,
        host=given["host"],
        port=given["port"],
        tokens=_lines(given["token_file"], _TOKENS_VARIABLE, "--token-file", "token"),
        certificate=given["tls_certificate"],
        certificate_key=given["tls_key"],
        instances=given["instances"],
        peer_secrets=_lines(given["peer_secret_file"], _SECRETS_VARIABLE, "--peer-secret-file", "secret"),
        advertise=given["advertise"],
        authority=given["tls_authority"],
        copies=given["copies"],
        store=given["store"],
        state_dir=given["state_dir"],
        access_log=given["access_log"],
        limits=Limits(**named),
    )


def _schemas(registry: str | None, config: str | None) -> SchemaValues | None:
    """What shows values with schemas; None: there is no registry."""
    from onceflow.schema_registry.json_view import JsonView
    from onceflow.server.schema_values import SchemaValues

    url = url_of(registry, config)
    # Clients ask again themselves, and until then their requests wait.
    return SchemaValues(JsonView(client_of(url, config, wait=0))) if url else None


def _table(text: str, key: str, value: str, schemas: SchemaValues | None) -> tuple[str, Any]:
    from onceflow.server.formats import Format

    topic, *formats = text.split(",")
    named = {"key": key, "value": value}
    for each in formats:
        name, separator, wanted = each.partition("=")
        if name not in named or not separator:
            raise click.UsageError(f"{text!r} is not TOPIC or TOPIC,key=FORMAT,value=FORMAT")
        named[name] = wanted
    return topic, Format.of(**named, schemas=schemas)


def _lines(file: Path | None, variable: str, option: str, what: str) -> list[str]:
    """The tokens or secrets in a file, or else in an environment variable."""
    text = os.environ.get(variable) if file is None else file.read_text()
    if text is None:
        return []
    found = text.split()
    if not found:  # whoever names tokens does not mean that everybody may ask
        where = f"the variable {variable} is set, but" if file is None else f"{option} {file}"
        raise click.UsageError(f"{where} has no {what}")
    return found


def check_packages() -> None:
    """Refuse to begin without the packages of the query server.

    Raises:
        EnvironmentUnusableError: one is missing.
    """
    try:
        import aiohttp  # noqa: F401
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise EnvironmentUnusableError(
            f"The query server needs the package {missing.name}", next_step="pip install 'onceflow[serve]'"
        ) from missing


def _log() -> None:
    """Lines on standard error: plain ones, or JSON where the environment asks for it."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(json_logs.JsonLogFormatter() if json_logs.is_wanted(None) else plain)
    for name, level in (("onceflow", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    # It logs every lost connection as an error; what that means for tables is logged by onceflow.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
