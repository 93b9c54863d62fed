"""``ProtobufSerde``: Protobuf messages whose files are in a registry."""

from __future__ import annotations

import base64
import binascii
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.schema_registry import proto_text, wire_format
from onceflow.schema_registry.base import RegistrySerde
from onceflow.schema_registry.client import RegisteredSchema, RegistryClient
from onceflow.schema_registry.wire_format import SchemaId

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor
    from google.protobuf.message import Message

#: Files that every program with Protobuf has: Confluent's serializers do not register them.
_EVERYBODYS = ("google/protobuf/", "google/type/", "confluent/")

#: So many bytes cannot be nested deeper than Protobuf reads.
_SHALLOW_BYTES = 200

#: Each after those that it imports.
_WELL_KNOWN = (
    "any", "source_context", "type", "api", "descriptor", "duration", "empty", "field_mask", "struct", "timestamp",
    "wrappers",
)  # fmt: skip


class ProtobufFile:
    """A file of messages.

    Args:
        schema: of the registry.
        messages: the full name of each message, by the path to it.

    Attributes:
        changes: what of a message of this file another class may lose, once that was looked at.
    """

    def __init__(self, schema: RegisteredSchema, messages: dict[tuple[int, ...], str]) -> None:
        self.messages = messages
        self.changes: list[str] | None = None
        self._schema = schema

    @classmethod
    def of(cls, schema: RegisteredSchema) -> ProtobufFile:
        """The file of a schema. Raises: ValueError: it is none."""
        return cls(schema, _all_messages(schema))

    def message(self, name: str) -> Any:
        """The class of a message; None: the registry gives only the text of the file, or cannot be understood."""
        path = next((path for path, each in self.messages.items() if each == name), None)
        try:
            return None if path is None else message_class(self._schema, path)
        except ValueError:
            return None


class ProtobufSerde(RegistrySerde[ProtobufFile]):
    """A serde of Protobuf. Made by `SchemaRegistry.protobuf`.

    Values are messages of the given class. A field that the class does not have is kept, and is there again when the
    message is written. ``decode`` refuses a value of another message: fields are found by their numbers alone, so one
    could be read as the other.
    """

    kind = "PROTOBUF"
    form = "serialized"  # a FileDescriptorProto, in Base64

    def __init__(
        self,
        registry: RegistryClient,
        subject: str,
        message: Any,
        *,
        register: bool = False,
        ids_in_headers: bool = False,
    ) -> None:
        if not hasattr(message, "DESCRIPTOR") or not hasattr(message, "FromString"):
            raise OptionError(
                f"{message!r} is no class of Protobuf messages", next_step="give a class of a module that protoc made"
            )
        super().__init__(registry, subject, None, register=register, ids_in_headers=ids_in_headers)
        self._message: Any = message

    def __getstate__(self) -> dict[str, Any]:
        """With the files of the message: the hosts of tasks need not have the module."""
        descriptor = self._message.DESCRIPTOR
        files = [(each.name, each.serialized_pb) for each in _with_imports(descriptor.file)]
        place = (self._message.__module__, self._message.__qualname__)
        return {**super().__getstate__(), "_message": (place, descriptor.full_name, files)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place, name, files = state["_message"]
        super().__setstate__({**state, "_message": _class_of(place, name, files)})

    @property
    def descriptor(self) -> Any:
        """Of the message."""
        return self._message.DESCRIPTOR

    def prepare(self) -> None:
        """See `RegistrySerde.prepare`."""
        _ = self._path

    def head(self) -> bytes:
        """See `RegistrySerde.head`: the id, and the place of the message in its file."""
        return super().head() + self._path

    def encode(self, value: Any) -> bytes:
        """The bytes of a message, with the id of its file.

        Raises:
            ValueError: it is another message, or lacks a required field.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        from google.protobuf.message import EncodeError, Message

        wanted = self._message.DESCRIPTOR.full_name
        found = value.DESCRIPTOR.full_name if isinstance(value, Message) else type(value).__name__
        if found != wanted:
            raise ValueError(f"it is {found}, and this serde is for {wanted}")
        _, before = self._ours()
        try:
            data: bytes = value.SerializeToString(deterministic=True)
        except EncodeError as error:
            raise ValueError(str(error)) from None
        if len(data) > _SHALLOW_BYTES:
            self._check_depth(data)
        return before + self._path + data

    def _check_depth(self, data: bytes) -> None:
        """Refuse what Protobuf writes and does not read: more than 100 messages, each in another."""
        from google.protobuf.message import DecodeError

        if self._is_recursive:
            try:
                self._message.FromString(data)
            except DecodeError as error:
                raise ValueError(f"it could not be read again: {error}; is it nested too deeply?") from None

    def decode(self, raw: bytes) -> Message:
        """The message.

        Raises:
            ValueError: it is another message, or no message.
            EnvironmentUnusableError: see `RegistrySerde.own`.
        """
        from google.protobuf.message import DecodeError

        schema_id, at = wire_format.split(raw)
        path, at = wire_format.message_path(raw, at)
        file = self._writer(schema_id)
        messages = file.messages
        wanted = self._message.DESCRIPTOR.full_name
        if path not in messages:
            raise ValueError(f"its file with {schema_id} has no message {'.'.join(map(str, path))}")
        if messages[path] != wanted:
            raise ValueError(f"it is a {messages[path]}, and this serde is for {wanted}")
        try:
            message = self._message.FromString(bytes(raw[at:]))
        except DecodeError as error:
            raise ValueError(f"it is no {wanted}: {error}") from None
        if not message.IsInitialized():
            raise ValueError(f"it lacks {', '.join(message.FindInitializationErrors())}")
        if self._changes_of(file):
            self._check(file, message, raw, at, schema_id)
        return message

    def _check(self, file: ProtobufFile, message: Any, raw: bytes, at: int, schema_id: SchemaId) -> None:
        """Refuse a value with a field that the class has read as another value."""
        from google.protobuf.message import DecodeError

        from onceflow.schema_registry.protobuf_changes import lost

        try:
            written = file.message(message.DESCRIPTOR.full_name).FromString(bytes(raw[at:]))
        except DecodeError as error:
            raise ValueError(f"it does not fit its schema with {schema_id}: {error}") from None
        field = lost(written, message)
        if field:
            raise ValueError(f"its schema with {schema_id} cannot be read with that of the class: {field}")

    def _changes_of(self, file: ProtobufFile) -> list[str]:
        """What of its message in a file the class may lose. It is looked up once a file."""
        if file.changes is None:
            from onceflow.schema_registry.protobuf_changes import unreadable

            descriptor = self._message.DESCRIPTOR
            written = file.message(descriptor.full_name)
            file.changes = [] if written is None else unreadable(written.DESCRIPTOR, descriptor)
        return file.changes

    def _changes(self, writer: ProtobufFile, reader: ProtobufFile) -> list[str]:
        wanted = self._message.DESCRIPTOR.full_name
        if wanted not in writer.messages.values():
            return [f"its file has no message {wanted}, but {', '.join(writer.messages.values())}"[:300]]
        return self._changes_of(writer)

    # ---- its file ------------------------------------------------------------------------------------

    @functools.cached_property
    def _is_recursive(self) -> bool:
        """Whether a message may have another one of its own type in it, at any depth."""
        return _is_recursive(self._message.DESCRIPTOR, (), set())

    @functools.cached_property
    def _path(self) -> bytes:
        """The bytes that say which message of its file it is."""
        messages = self._ours()[0].messages
        wanted = self._message.DESCRIPTOR.full_name
        for path, name in messages.items():
            if name == wanted:
                return wire_format.path_bytes(path)
        raise EnvironmentUnusableError(
            f"The file of the subject {self.subject!r} has no message {wanted}",
            detail=f"it has {', '.join(messages.values())}"[:300],
            next_step="register the file of the message, or give another subject",
        )

    def _find(self) -> RegisteredSchema:
        if not self._register:
            return super()._find()
        return self._registered(self._message.DESCRIPTOR.file, self.subject)

    def _registered(self, file: FileDescriptor, subject: str) -> RegisteredSchema:
        """A file, registered with those that it imports: each under its own name, as Confluent's serializers do."""
        from confluent_kafka.schema_registry import SchemaReference

        references = []
        for each in file.dependencies:
            if not each.name.startswith(_EVERYBODYS):
                self._registered(each, each.name)
                found = self.registry.newest(each.name, self.form)
                references.append(SchemaReference(each.name, each.name, found.version))
        text = base64.b64encode(file.serialized_pb).decode()
        return self.registry.register(subject, text, self.kind, references)

    def _parse(self, schema: RegisteredSchema) -> ProtobufFile:
        return ProtobufFile.of(schema)


def _all_messages(schema: RegisteredSchema) -> dict[tuple[int, ...], str]:
    """The full name of each message of a file, by the path to it."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        file = FileDescriptorProto.FromString(base64.b64decode(schema.text, validate=True))
    except ValueError:  # not in Base64: registries that do not know the form give the text
        return proto_text.messages(schema.text)
    except DecodeError as error:
        raise ValueError(f"it is no Protobuf file: {error}") from None
    return dict(_messages(file.message_type, (), f"{file.package}." if file.package else ""))


def _messages(found: Any, above: tuple[int, ...], before: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for at, each in enumerate(found):
        yield (*above, at), before + each.name
        yield from _messages(each.nested_type, (*above, at), f"{before}{each.name}.")


def message_class(schema: RegisteredSchema, path: tuple[int, ...]) -> Any:
    """A class of the messages at a place of a file.

    Raises:
        ValueError: the registry gives only the text of the file, or has no such message.
    """
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    pool = descriptor_pool.DescriptorPool()
    for module in _WELL_KNOWN:
        known = importlib.import_module(f"google.protobuf.{module}_pb2")
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)

    def add(name: str | None, each: RegisteredSchema) -> str:
        for its_name, referenced in each.references:
            add(its_name, referenced)
        file = FileDescriptorProto.FromString(base64.b64decode(each.text, validate=True))
        file.name = name or file.name or "schema.proto"
        if file.name not in added:
            added.add(file.name)
            for imported in file.dependency:
                if imported not in added and imported.startswith(_EVERYBODYS):
                    _add_known(pool, imported, added)
            pool.Add(file)
        return str(file.name)

    added: set[str] = set()
    try:
        file = pool.FindFileByName(add(None, schema))
        found: Any = list(file.message_types_by_name.values())[path[0]]
        for part in path[1:]:
            found = found.nested_types[part]
    except binascii.Error:
        raise ValueError("the registry gives only the text of its Protobuf file") from None
    except (LookupError, TypeError, ValueError, DecodeError) as error:
        raise ValueError(f"its Protobuf file cannot be used: {error}"[:300]) from None
    return message_factory.GetMessageClass(found)


def _add_known(pool: Any, name: str, added: set[str]) -> None:
    """Add a file that no registry has, and those that it imports: it is in a module of this host.

    Raises:
        ValueError: it is not.
    """
    module = name.removesuffix(".proto").replace("/", ".") + "_pb2"
    for place in ("", "confluent_kafka.schema_registry."):
        try:
            file = importlib.import_module(place + module).DESCRIPTOR
        except ImportError:
            continue
        for each in _with_imports(file):
            if each.name not in added and not each.name.startswith("google/protobuf/"):
                added.add(each.name)
                pool.AddSerializedFile(each.serialized_pb)
        return
    if not name.startswith("google/protobuf/"):
        raise ValueError(f"it imports {name}, which this host does not have")


def _is_recursive(message: Any, above: tuple[str, ...], done: set[str]) -> bool:
    name = message.full_name
    if name in above:
        return True
    if name in done:
        return False
    inside = (field.message_type for field in message.fields if field.message_type is not None)
    found = any(_is_recursive(each, (*above, name), done) for each in inside)
    done.add(name)
    return found


def _with_imports(file: FileDescriptor) -> list[FileDescriptor]:
    """A file behind those that it imports."""
    found: dict[str, FileDescriptor] = {}

    def add(each: FileDescriptor) -> None:
        for imported in each.dependencies:
            add(imported)
        found.setdefault(each.name, each)

    add(file)
    return [*found.values()]


def _class_of(place: tuple[str, str], name: str, files: list[tuple[str, bytes]]) -> Any:
    """A class of messages: that of its module if this host has it, or else one that is made of the files."""
    from google.protobuf import descriptor_pool, message_factory

    try:
        found = getattr(importlib.import_module(place[0]), place[1])
        if found.DESCRIPTOR.full_name == name:
            return found
    except (ImportError, AttributeError):
        pass
    pool = descriptor_pool.DescriptorPool()
    for _, content in files:
        pool.AddSerializedFile(content)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
