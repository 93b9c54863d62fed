"""``ClaimCheck``: a serde that keeps large values in storage."""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.claim_check.objects import ObjectStore
from onceflow.claim_check.reference import PREFIX, Reference, is_reference
from onceflow.claim_check.stored_value import StoredValue
from onceflow.errors import ClaimCheckError, OptionError
from onceflow.object_storage import CHUNK_BYTES
from onceflow.options.arguments import checked_arguments
from onceflow.options.sizes import size_bytes
from onceflow.state.api.serdes import BYTES, is_serde, prepare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ClaimCheck:
    """A serde that keeps large values in a local folder or a bucket. References to them travel through Kafka.

    ::

        pictures = onceflow.ClaimCheck("s3://pictures/claims", above="900 KB")

        class Resize(onceflow.Processor):
            value = output = pictures

    ``encode`` returns when the value is stored durably, and so before the transaction of its reference commits.
    ``decode`` reads and verifies it. Use it wherever a serde is taken: for values, outputs, state, maps, tables. It is
    not for keys. Credentials in ``storage_options`` travel to tasks, but appear in no reference, error or log.

    Args:
        store: where large values of one cluster are kept: a local folder that all hosts see, ``s3://``, ``gs://`` or
            ``az://``.
        above: values of more bytes than this are stored: ``"1 MB"``, or a number of bytes.
        inner: the serde of the values themselves; None: they are bytes.
        storage_options: options of the bucket, with the names that `DeltaSink` takes; None: those of the environment.

    Raises:
        OptionError: an argument cannot be used.
    """

    @checked_arguments
    def __init__(
        self,
        store: str | os.PathLike[str],
        above: str | int = "1 MB",
        *,
        inner: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._above = size_bytes(above)
        except ValueError as error:
            raise OptionError(f"above={above!r}: {error}", next_step='for example above="1 MB"') from None
        inner = BYTES if inner is None else inner
        if not is_serde(inner):
            raise OptionError(f"inner={inner!r} is not a serde", next_step="give serdes.STRING, serdes.JSON, ...")
        self._store = ObjectStore(store, storage_options)
        self._inner = inner
        self._lazy = False

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"claim check of {getattr(self._inner, 'name', type(self._inner).__name__)} in {self._store.url}"

    def __repr__(self) -> str:
        return f"<serde {self.name}>"

    def wrap(self, inner: Any) -> ClaimCheck:
        """The same with another serde of the values: ``pictures.wrap(serdes.JSON)``.

        Raises:
            OptionError: it is not a serde.
        """
        if not is_serde(inner):
            raise OptionError(f"{inner!r} is not a serde", next_step="give serdes.STRING, serdes.JSON, ...")
        found = copy.copy(self)
        found._inner = inner
        return found

    def lazy(self) -> ClaimCheck:
        """The same, but ``decode`` returns a `StoredValue`, which reads the value only when it is asked to."""
        found = copy.copy(self)
        found._lazy = True
        return found

    # ---- a serde -------------------------------------------------------------------------------------

    def encode(self, value: Any) -> bytes:
        """The bytes for Kafka: those of the inner serde, or a reference to them when they were stored.

        Args:
            value: what the inner serde takes, or what `put_file` returned, or a `StoredValue`.

        Raises:
            StorageUnavailableError: the store cannot be written.
            ClaimCheckError: `put_file` of another store has returned it.
        """
        if isinstance(value, Reference):
            if value.place not in ("", self._store.place):
                raise ClaimCheckError(
                    f"Object {value.name} was stored by another claim check than that of {self._store.url}, which has "
                    "to write the reference",
                    next_step="call put_file() of the claim check that is the serde of the output",
                )
            return bytes(value)
        if isinstance(value, StoredValue):
            same = value.store_place == self._store.place
            return value.raw if same else self.encode_bytes(value.read_bytes())
        return self.encode_bytes(self._inner.encode(value))

    def encode_bytes(self, raw: bytes) -> bytes:
        """As `encode`, for a value that is bytes already."""
        # What looks like a reference has to become one, or it would be taken for one.
        return bytes(self._store.put(raw)) if len(raw) > self._above or is_reference(raw) else raw

    def decode(self, raw: bytes) -> Any:
        """The value. What is not a reference is decoded by the inner serde.

        Raises:
            ClaimCheckError: the object is missing or was altered, or the reference cannot be read.
            StorageUnavailableError: the store cannot be read.
        """
        if self._lazy:
            return StoredValue(raw, self._store, self._inner)
        return self._inner.decode(self.decode_bytes(raw))

    def decode_bytes(self, raw: bytes) -> bytes:
        """As `decode`, without the inner serde."""
        return StoredValue(raw, self._store, self._inner).read_bytes() if is_reference(raw) else raw

    def prepare(self) -> None:
        """Have the inner serde find what it needs."""
        prepare(self._inner)

    def __getattr__(self, name: str) -> Any:
        # What the inner serde has of schemas: of values that are not stored, the bytes are its own.
        if name in ("writes_with", "subject_ids", "unreadable", "in_own_schema") and "_inner" in self.__dict__:
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def decodes_large(self, values: Any) -> bool:
        """Whether there is a reference in an Arrow column that `decode` would read: then fewer are decoded at once."""
        if self._lazy or values.null_count == len(values):
            return False
        return bool(pc.any(pc.starts_with(values.cast(pa.large_binary()), PREFIX)).as_py())

    # ---- files, for producers and consumers without Spark ----------------------------------------------

    def put_file(self, path: str | os.PathLike[str]) -> bytes:
        """The bytes for Kafka of a value that is a local file, which is stored in bounded memory.

        A file that is not larger than ``above`` becomes the value itself. Yield the result as it is, or produce it with
        any client.

        Raises:
            FileNotFoundError, PermissionError: there is no such file, or it may not be read.
            StorageUnavailableError: the store cannot be written.
        """
        if os.path.getsize(path) > self._above:
            return self._store.put_file(path)
        raw = Path(path).read_bytes()
        return self._store.put(raw) if len(raw) > self._above or is_reference(raw) else raw

    def open(self, raw: bytes) -> IO[bytes]:
        """The bytes of a value as a stream; see `StoredValue.open`."""
        return StoredValue(raw, self._store, self._inner).open()

    def get_file(self, raw: bytes, path: str | os.PathLike[str]) -> None:
        """Write the bytes of a value to a local file, in bounded memory. The file appears when all is verified.

        Raises:
            ClaimCheckError, StorageUnavailableError: see `decode`.
        """
        target = Path(path)
        unfinished = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        try:
            with self.open(raw) as source, unfinished.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    file.write(chunk)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    # ---- columns, for queries without a processor ------------------------------------------------------

    def store(self, df: DataFrame, column: str = "value") -> DataFrame:
        """Store the large values of a column: what remains are references and small values.

        Use it before a shuffle, and so before `Flow.write`. The inner serde is not used: the column has bytes already.

        Args:
            df: a DataFrame, also a streaming one.
            column: of type binary or string; binary in the result.

        Raises:
            SchemaError: there is no such column, or it has another type.
        """
        from onceflow.claim_check.columns import with_column

        return with_column(df, column, self.encode_bytes, "store")

    def load(self, df: DataFrame, column: str = "value") -> DataFrame:
        """Read the values of a column that `store` or `encode` has made, as binary. The inner serde is not used.

        Use it after a shuffle, and select what you need of the values as early as you can.

        Args:
            df: a DataFrame, also a streaming one. If it has the columns topic, partition and offset, errors name them.
            column: of type binary.

        Raises:
            SchemaError: there is no such column, or it has another type.
        """
        from onceflow.claim_check.columns import with_column

        return with_column(df, column, self.decode_bytes, "load")

    @property
    def objects(self) -> ObjectStore:
        """The objects of the store, for tools."""
        return self._store
