"""Values with a schema as JSON, whatever wrote them: for commands and for people."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

from onceflow.schema_registry import wire_format
from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.client import RegisteredSchema, RegistryClient
from onceflow.schema_registry.protobuf import ProtobufSerde, message_class
from onceflow.schema_registry.wire_format import SchemaId
from onceflow.state.format import exact_json


class JsonView:
    """Reads values by the schemas that wrote them.

    Args:
        client: of the registry.
    """

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._avro = AvroSerde(client, "", None, register=False)
        self._kinds: dict[int | str, RegisteredSchema] = {}
        self._messages: dict[tuple[int | str, tuple[int, ...]], Any] = {}

    def read(self, raw: bytes) -> tuple[Any, SchemaId]:
        """A value as a JSON document, and its schema.

        Bytes of Avro and Protobuf become text in Base64, times ISO 8601, decimals numbers.

        Raises:
            ValueError: it does not begin with the id of a schema, or cannot be read with it.
            RegistryUnavailableError: the registry does not answer.
        """
        schema_id, at = wire_format.split(raw)
        kind = self._schema(schema_id).kind
        if kind == "AVRO":
            return plain(self._avro.read(raw, None, plain=False)), schema_id
        if kind == "JSON":
            return exact_json.loads(raw[at:]), schema_id
        if kind == "PROTOBUF":
            return self._message(raw, schema_id, at), schema_id
        raise ValueError(f"its schema with {schema_id} is {kind}, which is not known")

    @property
    def name(self) -> str:
        """Of the registry."""
        return self._client.name

    def id_of(self, raw: bytes) -> bytes:
        """What a value begins with that names its schema; empty: nothing."""
        try:
            return raw[: wire_format.split(raw)[1]]
        except ValueError:
            return b""

    def learn(self, raw: bytes) -> None:
        """Have the schema of a value. After that, `read` does not ask the registry for values with this schema.

        Raises: as `read`.
        """
        schema_id, _ = wire_format.split(raw)
        if self._schema(schema_id).kind == "AVRO":
            self._avro.learn(schema_id)

    def _schema(self, schema_id: SchemaId) -> RegisteredSchema:
        if schema_id.key not in self._kinds:
            self._kinds[schema_id.key] = self._client.by_id(schema_id, ProtobufSerde.form)
        return self._kinds[schema_id.key]

    def _message(self, raw: bytes, schema_id: SchemaId, at: int) -> Any:
        from google.protobuf.json_format import MessageToDict, SerializeToJsonError
        from google.protobuf.message import DecodeError

        path, at = wire_format.message_path(raw, at)
        if (schema_id.key, path) not in self._messages:
            self._messages[schema_id.key, path] = message_class(self._schema(schema_id), path)
        try:
            message = self._messages[schema_id.key, path].FromString(bytes(raw[at:]))
            return MessageToDict(message, preserving_proto_field_name=True)
        except (DecodeError, SerializeToJsonError, TypeError) as error:  # TypeError: an Any of a type that is not there
            raise ValueError(f"it does not fit its schema with {schema_id}: {error}"[:300]) from None


def plain(value: Any) -> Any:
    """What fastavro returns, as JSON has it."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, float) and value - value != 0:  # infinite, or no number
        return str(value)
    return str(value) if isinstance(value, UUID) else value
