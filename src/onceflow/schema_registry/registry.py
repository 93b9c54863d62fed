"""``SchemaRegistry``: a registry with the REST interface of Confluent's, which others have, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onceflow.options.arguments import checked_arguments
from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.client import WAIT, RegistryClient
from onceflow.schema_registry.json_schema import JsonSchemaSerde
from onceflow.schema_registry.protobuf import ProtobufSerde


class SchemaRegistry:
    """A schema registry, from which serdes of Avro, Protobuf and JSON Schema are made.

    ::

        registry = onceflow.SchemaRegistry("https://registry:8081", {"basic.auth.user.info": "alice:secret"})

        class Balance(onceflow.Processor):
            value = registry.avro("payments-value")
            output = registry.avro("balances-value")

    The bytes are those of Confluent's serializers: their producers and consumers can be used on the same topics.
    Schemas are kept in memory once they were read. A registry that does not answer fails the batch, which then runs
    again: no record becomes a dead letter because of it.

    Args:
        url: one address or several; the next one is asked if one does not answer.
        properties: more settings of confluent-kafka's ``SchemaRegistryClient``: ``basic.auth.user.info``,
            ``ssl.ca.location``, ``ssl.certificate.location``, ``ssl.key.location``, ``bearer.auth.credentials.source``
            and its other settings of OAuth, ``proxy``, ``timeout`` (seconds), ``max.retries``. They travel to tasks,
            but appear in no error and in no log.
        wait: how long a registry that does not answer is asked again, in each attempt of a batch and at the start of a
            flow, as a duration.

    Raises:
        OptionError: a setting is not known, or has a wrong value.
        EnvironmentUnusableError: the extra ``registry`` is not installed.
    """

    @checked_arguments
    def __init__(
        self,
        url: str | Sequence[str],
        properties: Mapping[str, Any] | None = None,
        *,
        wait: str | float = WAIT,
    ) -> None:
        self.client = RegistryClient(url, properties, wait)

    def __repr__(self) -> str:
        return f"<schema registry {self.client.name}>"

    def avro(
        self, subject: str, schema: Any = None, *, register: bool = False, ids_in_headers: bool = False
    ) -> AvroSerde:
        """A serde of Avro; see `AvroSerde`.

        Args:
            subject: where the registry has the schema, for example ``payments-value`` for the values of a topic.
            schema: the schema, as JSON or what JSON becomes. None: the newest version of the subject, when the flow
                starts.
            register: register the schema if the subject lacks it. Otherwise that is an error.
            ids_in_headers: outputs of processors have the id in the header ``__value_schema_id``, and not in front of
                the value. State and tables have it in front.
        """
        return AvroSerde(self.client, subject, _as_json(schema), register=register, ids_in_headers=ids_in_headers)

    def json_schema(
        self, subject: str, schema: Any = None, *, register: bool = False, ids_in_headers: bool = False
    ) -> JsonSchemaSerde:
        """A serde of JSON that is checked by a schema; see `JsonSchemaSerde`. Arguments as for `avro`."""
        return JsonSchemaSerde(self.client, subject, _as_json(schema), register=register, ids_in_headers=ids_in_headers)

    def protobuf(
        self, subject: str, message: Any, *, register: bool = False, ids_in_headers: bool = False
    ) -> ProtobufSerde:
        """A serde of Protobuf; see `ProtobufSerde`.

        Args:
            subject: as for `avro`.
            message: the class of the messages, which ``protoc`` has made.
            register: register the file of the message if the subject lacks it. Otherwise that is an error.
            ids_in_headers: as for `avro`.
        """
        return ProtobufSerde(self.client, subject, message, register=register, ids_in_headers=ids_in_headers)


def _as_json(schema: Any) -> Any:
    """A schema that is given as a dict or a list, as JSON."""
    return json.dumps(schema) if isinstance(schema, dict | list) else schema
