"""``RegistryClient``: asks a registry for schemas, and waits for one that does not answer."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onceflow.errors import EnvironmentUnusableError, OptionError, RegistryUnavailableError
from onceflow.options.durations import duration_ms
from onceflow.schema_registry.wire_format import SchemaId

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient


log = logging.getLogger("onceflow.schema_registry")

_T = TypeVar("_T")
#: For each of its addresses: `SchemaRegistry` asks again itself, so that it can say so.
_LIMITS = {"timeout": 10, "max.retries": 0}
#: For a connection and an answer that both take nearly as long as they may.
_MARGIN_S = 1.0
WAIT = "30 seconds"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.0
_NOT_FOUND = 404
_DEEPEST = 100
_CONFLICT = 409
_NO_ANSWER = -1
#: How long an id that the registry does not have is not asked for again. One that comes late may be known then.
_MISSING_S, _MOST_MISSING = 10.0, 10_000
_NOT_ALLOWED = {401: "does not accept the credentials", 403: "does not allow it"}
#: Answers to a schema that is wrong, in place of a registry that cannot answer.
_REFUSED = (400, _CONFLICT, 422)


#: The settings of a registry, and the process.
_Place = tuple[tuple[tuple[str, Any], ...], int]
_clients: dict[_Place, SchemaRegistryClient] = {}


class RegisteredSchema(NamedTuple):
    """A schema as the registry has it.

    Args:
        text: the schema: JSON, or the text of a Protobuf file.
        kind: ``AVRO``, ``PROTOBUF`` or ``JSON``.
        references: the name by which each referenced schema is called, and that schema.
        schema_id: None: it was not asked for.
        version: of its subject; None: it was looked up by its id.
    """

    text: str
    kind: str
    references: tuple[tuple[str, RegisteredSchema], ...] = ()
    schema_id: int | None = None
    version: int | None = None


class _NotNowError(Exception):
    """Why the registry cannot answer now."""

    def __init__(self, error: RegistryUnavailableError) -> None:
        super().__init__(error)
        self.error = error


class RegistryClient:
    """Asks a registry. Arguments and errors: as those of `SchemaRegistry`."""

    def __init__(
        self, url: str | Sequence[str], properties: Mapping[str, Any] | None = None, wait: str | float = WAIT
    ) -> None:
        try:
            self._wait_s = duration_ms(wait) / 1000
        except ValueError as error:
            raise OptionError(f"wait={wait!r}: {error}", next_step='for example wait="30 seconds"') from None
        self._missing: dict[tuple[int | str, str], float] = {}
        urls = _URLS.split(url) if isinstance(url, str) else [*url] if isinstance(url, (list, tuple)) else []
        if not all(isinstance(each, str) and _URL.match(each.strip()) for each in urls) or not urls:
            raise OptionError("SchemaRegistry has no usable URL", next_step='for example "http://localhost:8081"')
        if any("," in each for each in urls):
            raise OptionError(
                "A URL of SchemaRegistry has a comma, which separates addresses",
                next_step="give a password with a comma in the property basic.auth.user.info",
            )
        self._properties = {**_LIMITS, **(properties or {}), "url": ",".join(urls)}
        self.name = ", ".join(map(_without_password, urls))
        self._in_memory = all(each.strip().startswith("mock:") for each in urls)
        given = self._properties["timeout"]
        try_s = float(given) if isinstance(given, (int, float)) else float(_LIMITS["timeout"])
        self._try_s = (try_s + _MARGIN_S) * len(urls)
        try:
            _ = self.library
        except (ValueError, TypeError, OSError) as error:  # OSError: a certificate cannot be read
            raise OptionError(
                f"SchemaRegistry({self.name!r}) cannot be used: {error}",
                next_step="the settings are those of confluent-kafka's SchemaRegistryClient",
            ) from None

    # ---- what serdes ask -----------------------------------------------------------------------------

    def by_id(self, schema_id: SchemaId, form: str | None = None, subject: str = "") -> RegisteredSchema:
        """The schema that a record names.

        Args:
            form: the form of its text, see `RegistrySerde`.
            subject: where the id holds, if it is in a context: ``:.context:name``. Each context has ids of its own.

        Raises:
            ValueError: the registry does not have it.
            RegistryUnavailableError: it does not answer.
        """
        key = schema_id.key
        if self._missing.get((key, subject), 0.0) > time.monotonic():
            raise self._unknown(schema_id)
        context = subject[: subject.index(":", 1) + 1] if re.match(r":\.[^:]*:", subject) else None

        def ask() -> Any:
            if isinstance(key, int):
                return self.library.get_schema(key, context, form)
            return self.library.get_schema_by_guid(key, form)

        found = self._asked(f"for the schema with {schema_id}", ask, refusals=False)
        if found is None:
            if len(self._missing) > _MOST_MISSING:
                self._missing.clear()
            self._missing[key, subject] = time.monotonic() + _MISSING_S
            raise self._unknown(schema_id)
        return self._whole(found, key if isinstance(key, int) else None, None, form)

    def _unknown(self, schema_id: SchemaId) -> ValueError:
        return ValueError(f"the registry {self.name} has no schema with {schema_id}")

    def newest(self, subject: str, form: str | None = None) -> RegisteredSchema:
        """The newest version of a subject. Args: form: as for `by_id`.

        Raises:
            EnvironmentUnusableError: there is no such subject.
            RegistryUnavailableError: the registry does not answer.
        """
        found = self._asked(f"for the subject {subject!r}", lambda: self.library.get_latest_version(subject, form))
        if found is None:
            raise self._without_subject(subject)
        return self._whole(found.schema, found.schema_id, found.version, form)

    def registered(self, subject: str, text: str, kind: str, references: Sequence[Any] = ()) -> RegisteredSchema:
        """A schema that a subject has to have: with its id.

        Raises:
            EnvironmentUnusableError: the subject does not have it.
            RegistryUnavailableError: the registry does not answer.
        """
        schema = self._schema(text, kind, references)
        found = self._asked(f"for a schema of {subject!r}", lambda: self.library.lookup_schema(subject, schema))
        if found is None:
            raise EnvironmentUnusableError(
                f"The subject {subject!r} of the registry {self.name} does not have this schema",
                detail=text[:500],
                next_step="register it before, or say register=True",
            )
        return self._whole(schema, found.schema_id, found.version)

    def register(self, subject: str, text: str, kind: str, references: Sequence[Any] = ()) -> RegisteredSchema:
        """A schema that a subject gets if it does not have it: with its id.

        Raises:
            EnvironmentUnusableError: the registry refuses it, for example because it is not compatible.
            RegistryUnavailableError: the registry does not answer.
        """
        schema = self._schema(text, kind, references)
        found = self._asked(
            f"to register a schema of {subject!r}", lambda: self.library.register_schema(subject, schema)
        )
        if found is None:
            raise self._without_subject(subject)
        return self._whole(schema, found, None)

    def ids_of(self, subject: str) -> list[int]:
        """The ids of all versions of a subject; none: there is no such subject.

        Raises:
            RegistryUnavailableError: it does not answer.
        """
        found = []
        for version in (
            self._asked(f"for the versions of {subject!r}", lambda: self.library.get_versions(subject)) or ()
        ):
            get = functools.partial(self.library.get_version, subject, version)
            known = self._asked(f"for version {version} of {subject!r}", get)
            if known is not None and known.schema_id is not None:
                found.append(known.schema_id)
        return sorted({*found})

    def version_of(self, schema_id: SchemaId, subject: str) -> str:
        """Which version of a subject a schema is, in words for an error; empty: none, or it cannot be told."""
        key = schema_id.key
        if not isinstance(key, int):
            return ""

        def look() -> Any:
            return self.library.lookup_schema(subject, self.library.get_schema(key, subject))

        try:
            found = self._asked_once("for a version", look, False)
        except (_NotNowError, RegistryUnavailableError):  # it is no more than a help to people
            return ""
        return "" if found is None or found.version is None else f" (version {found.version} of {subject})"

    # ---- the client ----------------------------------------------------------------------------------

    @property
    def library(self) -> SchemaRegistryClient:
        """The client of confluent-kafka, one for each registry and process: its connections do not live on in a process
        that was forked."""
        found = _clients.get(self._place)
        return _clients.setdefault(self._place, _new_client(self._properties)) if found is None else found

    @property
    def _place(self) -> _Place:
        return tuple(sorted(self._properties.items(), key=str)), os.getpid()

    def _forget_library(self) -> None:
        _clients.pop(self._place, None)

    def _schema(self, text: str, kind: str, references: Sequence[Any]) -> Any:
        from confluent_kafka.schema_registry import Schema

        return Schema(text, kind, [*references])

    def _whole(
        self, schema: Any, schema_id: int | None, version: int | None, form: str | None = None, depth: int = 0
    ) -> RegisteredSchema:
        """A schema with all that it refers to."""
        if not isinstance(schema.schema_str, str):
            raise self._unavailable("for a schema", "answers without one", ValueError("no text"))
        if depth > _DEEPEST:
            raise ValueError("its references to other schemas have no end")
        references = []
        for each in schema.references or ():
            found = self._asked(
                f"for version {each.version} of {each.subject!r}",
                functools.partial(self.library.get_version, each.subject, each.version, True, form),
            )
            if found is None:
                raise ValueError(f"a schema refers to version {each.version} of {each.subject!r}, which is missing")
            references.append((each.name, self._whole(found.schema, found.schema_id, found.version, form, depth + 1)))
        return RegisteredSchema(schema.schema_str, schema.schema_type or "AVRO", tuple(references), schema_id, version)

    def _without_subject(self, subject: str) -> EnvironmentUnusableError:
        from onceflow.options.column_names import did_you_mean

        known = self._asked("for its subjects", self.library.get_subjects) or []
        return EnvironmentUnusableError(
            f"The registry {self.name} has no subject {subject!r}",
            next_step=f"{did_you_mean(subject, known)}Register a schema there before, or give a schema and say "
            "register=True",
        )

    def _asked(self, what: str, request: Callable[[], _T], *, refusals: bool = True) -> _T | None:
        """What the registry answers; None: there is no such thing.

        Args:
            refusals: whether it may refuse a schema. Otherwise such an answer means that there is none.

        Raises:
            RegistryUnavailableError: it does not answer, or cannot.
            EnvironmentUnusableError: it refuses a schema.
        """
        deadline, pause = time.monotonic() + self._wait_s, _FIRST_PAUSE_S
        while True:
            try:
                return self._asked_once(what, request, refusals, deadline - time.monotonic())
            except _NotNowError as problem:
                error = problem.error
            if time.monotonic() + pause > deadline:
                raise error
            log.warning("%s; it is asked again for %.0f s", error.what, deadline - time.monotonic())
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _asked_once(self, what: str, request: Callable[[], _T], refusals: bool, left_s: float = 0.0) -> _T | None:
        """As `_asked`, without a second try. Args: left_s: how long that may take at least; one try always may."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return request() if self._in_memory else self._within(max(left_s, self._try_s), request)
        except SchemaRegistryError as error:
            status = error.http_status_code
            if status == _NOT_FOUND and error.error_code != _NO_ANSWER:
                return None
            if status in _REFUSED and not refusals:
                return None
            if status in _REFUSED:
                raise EnvironmentUnusableError(
                    f"The registry {self.name} refuses a schema", detail=str(error)[:500]
                ) from None
            if status in _NOT_ALLOWED:
                raise self._unavailable(what, _NOT_ALLOWED[status], error) from None
            raise _NotNowError(self._unavailable(what, f"answers HTTP {status}", error)) from None
        except Exception as error:  # of its HTTP library, of TLS, or of the endpoint of OAuth
            raise _NotNowError(self._unavailable(what, "does not answer", error)) from None

    def _within(self, seconds: float, request: Callable[[], _T]) -> _T:
        """The answer to a request. The timeout of its HTTP library ends none of which a byte comes now and then."""
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True, name="onceflow-registry").start()
        wait([answer], seconds)
        if not answer.done():
            self._forget_library()  # the request may hold its locks
            raise TimeoutError(f"no whole answer within {seconds:.0f} s")
        return answer.result()

    def _unavailable(self, what: str, says: str, error: Exception) -> RegistryUnavailableError:
        return RegistryUnavailableError(
            f"The schema registry {self.name} was asked {what}, and {says}",
            detail=f"{type(error).__name__}: {error}"[:500],
            next_step="start it, or correct its address and credentials. The batch runs again; no record is at fault",
        )


def _new_client(properties: Mapping[str, Any]) -> SchemaRegistryClient:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as missing:
        raise EnvironmentUnusableError(
            "SchemaRegistry needs packages that are not installed",
            detail=str(missing),
            next_step="pip install 'onceflow[registry]', on the hosts of executors, too",
        ) from None
    return SchemaRegistryClient.new_client(dict(properties))


_URL = re.compile(r"(?:https?|mock)://.")
_URLS = re.compile(r",(?=\s*(?:https?|mock)://)")


def _without_password(url: str) -> str:
    before, at, host = url.strip().rpartition("@")
    return f"{before.partition('://')[0]}://{host}" if at else url.strip()
