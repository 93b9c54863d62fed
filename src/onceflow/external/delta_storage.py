"""Files beside a table of Delta Lake, through the storage of deltalake itself: with its options, wherever the table is.

Nothing here is conditional: every file has a name of its own, and what counts is decided by a commit of the table.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from onceflow.errors import EnvironmentUnusableError, OptionError, PermissionDeniedError
from onceflow.object_storage import check_place, sync

_SECRET = re.compile(r"secret|key|token|sas|password|credential|account", re.IGNORECASE)
_SECRET_LENGTH = 6  # shorter values are no secrets, and would hide parts of other words
_SIGNATURE = re.compile(r"((?:sig|signature|x-amz-signature|x-amz-security-token|x-amz-credential)=)[^&\s\"']+", re.I)
_DENIED = re.compile(r"\b(401|403)\b|AccessDenied|Forbidden|Unauthorized|InvalidAccessKeyId|SignatureDoesNotMatch")
_READ_OTHERWISE = re.compile(r"\\|%[0-9A-Fa-f]{2}")
_YES = ("1", "true", "t", "yes", "y", "on")


def load_deltalake() -> Any:
    """The package, which is an extra.

    Raises:
        EnvironmentUnusableError: it is not installed.
    """
    try:
        import deltalake
    except ImportError as error:
        raise EnvironmentUnusableError(
            "Tables of Delta Lake need the package deltalake",
            detail=str(error),
            next_step="pip install 'onceflow[delta]', on executors, too",
        ) from error
    return deltalake


class DeltaStorage:
    """The place of a table. Paths are relative to it, and have slashes.

    Args:
        root: a folder, or a URL of a kind that `check_place` knows. options: its storage options.

    Attributes:
        is_local: whether it is a folder.
    """

    def __init__(self, root: str | Path, options: Mapping[str, str]) -> None:
        given = str(root)
        check_place("root", given)
        if given.startswith("file://"):
            given = given.removeprefix("file://")
        self.is_local = "://" not in given
        self.root = str(Path(given).absolute()) if self.is_local else given.rstrip("/")
        if self.is_local and _READ_OTHERWISE.search(self.root):
            raise OptionError(
                f"The folder {self.root} cannot have a table of Delta Lake",
                detail="deltalake reads a backslash in its name as a slash, and % with two digits as another letter",
                next_step="use another name",
            )
        self.options = {str(name): str(value) for name, value in options.items()}
        self._handler: Any = None
        _check_options(self.options, self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handler": None}

    def table(self) -> Any:
        """The table as it is now."""
        return load_deltalake().DeltaTable(self.root, storage_options=self.options)

    def has_table(self) -> bool:
        return bool(load_deltalake().DeltaTable.is_deltatable(self.root, self.options))

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Tells whether the storage cannot be reached, or refuses.

        Raises:
            ConnectionError: it cannot be reached.
            PermissionDeniedError: it refuses.
        """
        try:
            yield
        except (FileNotFoundError, ConnectionError):
            raise
        except OSError as error:
            if self.is_local:
                raise
            text = self.said(error)
            if _DENIED.search(text):
                raise PermissionDeniedError(
                    f"{self.root} refuses a request",
                    detail=text,
                    next_step="check storage_options= and what they may do: list, read, write and delete there",
                ) from None
            raise ConnectionError(text) from None

    def said(self, error: BaseException) -> str:
        """The text of an error in one line, without colours and secrets."""
        text = " ".join(re.sub(r"\x1b\[\d+m|↳", " ", str(error)).split())
        for name, value in self.options.items():
            if _SECRET.search(name) and len(value) >= _SECRET_LENGTH:
                text = text.replace(value, "***")
        return _SIGNATURE.sub(r"\1***", text)

    # ---- files ---------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> None:
        """Create a file that lasts."""
        with self.writing(path) as file:
            file.write(content)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """A new file that lasts when the block has ended without an error."""
        file = self._files().open_output_stream(path)
        try:
            yield cast(IO[bytes], file)
        finally:
            file.close()
        if self.is_local:
            self.sync(path)

    def sync(self, path: str) -> None:
        """Make a file of a folder last through a power failure: deltalake does not."""
        full, parts = Path(self.root, path), Path(path).parts
        for each in (full, *full.parents[: len(parts)]):
            sync(each)

    def read(self, path: str) -> bytes | None:
        """The content; None: there is no such file."""
        try:
            file = self._files().open_input_file(path)
        except FileNotFoundError:
            return None
        return bytes(file.read(file.size()))

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; none if there is no such folder."""
        from pyarrow.fs import FileType

        found = self._files().get_file_info_selector(folder, True, False)
        return sorted(each.base_name for each in found if each.type == FileType.File)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files().delete_file(path)

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files().delete_dir(folder)
        if self.is_local:  # it has removed the files, and no folder
            shutil.rmtree(Path(self.root, folder), ignore_errors=True)

    def _files(self) -> Any:
        if self._handler is None:
            load_deltalake()
            from deltalake._internal import DeltaFileSystemHandler  # pyarrow's filesystem cannot write bytes with it

            if self.is_local:
                Path(self.root).mkdir(parents=True, exist_ok=True)
            self._handler = DeltaFileSystemHandler(table_uri=self.root, options=self.options)
        return self._handler


def _check_options(options: Mapping[str, str], root: str) -> None:
    """Refuse what lets two drivers overwrite each other's commit: exactly-once depends on its condition."""
    given = {name.lower(): value.lower() for name, value in [*os.environ.items(), *options.items()]}
    for name in ("aws_s3_allow_unsafe_rename", "mount_allow_unsafe_rename"):
        if given.get(name, "") in _YES:
            raise OptionError(
                f"{name.upper()} must not be set for {root}",
                detail="two drivers could overwrite each other's commits",
                next_step="leave it out: deltalake creates commits on the condition that they do not exist",
            )
    for name in ("aws_conditional_put", "conditional_put"):
        if given.get(name) == "disabled":
            raise OptionError(
                f"{name}=disabled cannot be used for {root}",
                detail="two drivers could overwrite each other's commits",
                next_step="leave it out, or configure a lock of deltalake (AWS_S3_LOCKING_PROVIDER)",
            )
