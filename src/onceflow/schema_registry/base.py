"""What the serdes of a registry have in common: which schema they write with, and the schemas they have met."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from onceflow.errors import EnvironmentUnusableError
from onceflow.schema_registry.client import RegisteredSchema, RegistryClient
from onceflow.schema_registry.wire_format import VALUE_HEADER, SchemaId, prefix

_Parsed = TypeVar("_Parsed")
_MOST_CHANGES = 5


class RegistrySerde(ABC, Generic[_Parsed]):
    """A serde whose schemas are in a registry.

    Args:
        subject: where its own schema is. text: the schema; None: the newest version.
        register, ids_in_headers: see `SchemaRegistry.avro`.
    """

    #: As the registry calls it.
    kind: str
    #: The header that may have the id of a value. Engines put it in front.
    id_header = VALUE_HEADER
    #: In which form the registry shall give texts; None: as they were registered.
    form: str | None = None

    def __init__(
        self,
        registry: RegistryClient,
        subject: str,
        text: str | None,
        *,
        register: bool = False,
        ids_in_headers: bool = False,
    ) -> None:
        self.registry = registry
        #: Whether outputs have what `head` returns in the header of this name, and not in front.
        self.ids_in_headers = ids_in_headers
        self.subject = subject
        self._text = text
        self._register = register
        self._own: RegisteredSchema | None = None
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._parsed: dict[int | str, _Parsed] = {}
        self._parsed_own: tuple[_Parsed, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For tasks. All have the same schema: the one that the driver has found."""
        self.own()
        lost = ("_lock", "_parsed", "_parsed_own")
        return {name: value for name, value in self.__dict__.items() if name not in lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"{self.kind} of {self.subject}"

    def __repr__(self) -> str:
        return f"<serde {self.name}>"

    def own(self) -> RegisteredSchema:
        """The schema that it writes with, and that values have when they were read. It is looked up once.

        Raises:
            EnvironmentUnusableError: the registry does not have it, or it is of another kind.
            RegistryUnavailableError: the registry does not answer.
        """
        if self._own is None:
            try:
                found = self._find()
            except ValueError as error:
                raise EnvironmentUnusableError(f"The schema of {self.subject!r} cannot be used: {error}") from None
            self._of_kind(found, f"the subject {self.subject!r}", EnvironmentUnusableError)
            self._own = found
        return self._own

    def prepare(self) -> None:
        """Called when the flow is defined: what is wrong with the own schema is said there. Raises: as `own`."""
        self._ours()

    def writes_with(self) -> int:
        """The id of the schema of all values that it writes. Raises: as `own`."""
        found = self._ours()[1]
        return int.from_bytes(found[-4:], "big")

    def subject_ids(self) -> list[int]:
        """The ids of all versions of its subject. Raises: as `own`."""
        return self.registry.ids_of(self.subject)

    def head(self) -> bytes:
        """What stands in front of all values that it writes. Raises: as `own`."""
        return self._ours()[1]

    def unreadable(self, ids: Iterable[int]) -> dict[bytes, str]:
        """Which values of other schemas may be unreadable for this serde: how they begin, and what has changed.

        Raises:
            RegistryUnavailableError: the registry does not answer.
        """
        own, before = self._ours()
        found = {}
        for number in ids:
            schema_id = SchemaId(number)
            try:
                changes = [] if prefix(number) == before else self._changes(self._writer(schema_id), own)
                version = self.registry.version_of(schema_id, self.subject) if changes else ""
            except ValueError as error:
                changes, version = [str(error)], ""
            if changes:
                found[prefix(number)] = f"schema with {schema_id}{version}: {shortened(changes)}"
        return found

    def in_own_schema(self, raw: bytes) -> bytes:
        """A value as it would be written now; what cannot be read stays as it is. Raises: as `unreadable`."""
        if raw.startswith(self._ours()[1]):
            return raw
        try:
            return self.encode(self.decode(raw))
        except ValueError:
            return raw

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """See the class."""

    @abstractmethod
    def decode(self, raw: bytes) -> Any:
        """See the class."""

    @abstractmethod
    def _changes(self, writer: _Parsed, reader: _Parsed) -> list[str]:
        """What of a schema cannot be read with another one, as far as the schemas alone tell."""

    def _find(self) -> RegisteredSchema:
        if self._text is None:
            return self.registry.newest(self.subject, self.form)
        find = self.registry.register if self._register else self.registry.registered
        return find(self.subject, self._text, self.kind)

    @abstractmethod
    def _parse(self, schema: RegisteredSchema) -> _Parsed:
        """What the codec makes of a schema. Raises: ValueError: it is none."""

    def learn(self, schema_id: SchemaId) -> None:
        """Have a schema. Raises: as `_writer`."""
        self._writer(schema_id)

    def _writer(self, schema_id: SchemaId) -> _Parsed:
        """The schema that a record was written with.

        Raises:
            ValueError: the registry does not have it, it is of another kind, or it cannot be parsed.
            RegistryUnavailableError: the registry does not answer.
        """
        parsed = self._parsed.get(schema_id.key)
        if parsed is None:
            with self._lock:
                found = self.registry.by_id(schema_id, self.form, self.subject)
                self._of_kind(found, f"its schema with {schema_id}", ValueError)
                parsed = self._parsed[schema_id.key] = self._parse(found)
        return parsed

    def _ours(self) -> tuple[_Parsed, bytes]:
        """The own schema, and what stands before the values that it writes."""
        if self._parsed_own is None:
            own = self.own()
            if type(own.schema_id) is not int or not 0 <= own.schema_id < 1 << 32:
                raise EnvironmentUnusableError(f"The registry gave no id for the schema of {self.subject!r}")
            try:
                parsed = self._parsed.setdefault(own.schema_id, self._parse(own))
                self._parsed_own = parsed, prefix(own.schema_id)
            except ValueError as error:
                raise EnvironmentUnusableError(f"The schema of {self.subject!r} cannot be used: {error}") from None
        return self._parsed_own

    def _of_kind(self, found: RegisteredSchema, what: str, refused: type[Exception]) -> None:
        if found.kind != self.kind:
            raise refused(f"{what} is {found.kind}, and this serde is for {self.kind}")


def shortened(changes: list[str]) -> str:
    """The first changes of a schema, in words."""
    more = len(changes) - _MOST_CHANGES
    return "; ".join([*changes[:_MOST_CHANGES], *([f"and {more} more"] if more > 0 else [])])
