"""``StoredValue``: a value that is read only when it is asked for; and how stored values are read and verified."""

from __future__ import annotations

import hashlib
import io
from typing import IO, Any

from onceflow.claim_check.objects import ObjectStore, altered
from onceflow.claim_check.reference import Reference, is_reference
from onceflow.errors import OnceflowError
from onceflow.object_storage import CHUNK_BYTES


class StoredValue:
    """A value that a serde of `ClaimCheck.lazy` has decoded: nothing is read before `read` or `open` is called.

    A small value, which was not stored, looks the same from outside. When it is yielded, or put into state, through a
    claim check of the same store, the reference travels on, and nothing is copied.

    Attributes:
        raw: what was in Kafka: a reference, or the bytes of a small value.
        size: bytes of the value.
    """

    def __init__(self, raw: bytes, store: ObjectStore, inner: Any) -> None:
        self._reference = Reference.parse(raw) if is_reference(raw) else None
        self.raw = bytes(raw)
        self.size = len(raw) if self._reference is None else self._reference.size
        self._store, self._inner = store, inner

    @property
    def name(self) -> str | None:
        """The object's name, relative to the store; None: the value was not stored."""
        return None if self._reference is None else self._reference.name

    @property
    def store_place(self) -> str:
        """See `ObjectStore.place`."""
        return self._store.place

    def open(self) -> IO[bytes]:
        """The bytes of the value as a stream, for values that should not be in memory as a whole.

        It has `read` and `close`, but no `seek`. Content that was altered raises ClaimCheckError at the latest when the
        end is read; so use nothing for good before that.

        Raises:
            ClaimCheckError: the object is missing, or was altered.
            StorageUnavailableError: the store cannot be read.
        """
        if self._reference is None:
            return io.BytesIO(self.raw)
        return io.BufferedReader(VerifiedReader(self._store, self._reference), CHUNK_BYTES)

    def read_bytes(self) -> bytes:
        """The bytes of the value, verified. As `open`."""
        if self._reference is None:
            return self.raw
        with VerifiedReader(self._store, self._reference) as source:
            # Filled in place: joining chunks would need the memory of the value twice.
            whole = io.BytesIO(bytes(self.size))
            while chunk := source.read(CHUNK_BYTES):
                whole.write(chunk)
        return whole.getvalue()

    def read(self) -> Any:
        """The value, decoded by the inner serde. As `open`."""
        return self._inner.decode(self.read_bytes())

    def __repr__(self) -> str:
        return f"<stored value of {self.size:,} bytes{'' if self.name is None else f' in {self.name}'}>"


class VerifiedReader(io.RawIOBase):
    """Reads an object from its beginning to its end, and verifies size and checksum.

    Raises:
        ClaimCheckError, StorageUnavailableError: see `StoredValue.open`.
    """

    def __init__(self, store: ObjectStore, reference: Reference) -> None:
        super().__init__()
        self._store, self._reference = store, reference
        self._file = store.open(reference)
        self._checksum = hashlib.sha256()
        self._count = 0
        self._verified = False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        """Read the next bytes. At the end (0), all of the content is verified."""
        view = memoryview(target).cast("B")
        if not len(view):
            return 0
        try:
            chunk = self._file.read(min(len(view), CHUNK_BYTES))
        except OnceflowError:
            raise
        except FileNotFoundError:
            raise altered(self._store.url, self._reference, "it was deleted while it was read") from None
        except Exception as error:
            raise self._store.failed("read", self._reference.name, error) from error
        view[: len(chunk)] = chunk
        self._checksum.update(chunk)
        self._count += len(chunk)
        if not self._verified and (not chunk or self._count >= self._reference.size):
            self._verify()
        return len(chunk)

    def _verify(self) -> None:
        size, found = self._reference.size, self._checksum.hexdigest()
        if self._count != size:
            raise altered(self._store.url, self._reference, f"it has {self._count:,} bytes instead of {size:,}")
        if found != self._reference.sha256:
            raise altered(self._store.url, self._reference, f"its SHA-256 is {found}")
        self._verified = True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
