"""Folders that only this user may read or write: local state, caches, logs and sockets.

State has the data of others, jars of a cache are executed, and names below the temporary folder can be guessed: another
user may have put a folder or a link there first.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from onceflow.errors import EnvironmentUnusableError

_WRITTEN_BY_OTHERS, _WRITTEN_BY_ALL = 0o022, 0o002


def make_private(folder: Path) -> Path:
    """Make a folder, and what is missing above it, for this user alone. What exists stays as it is.

    Returns:
        The folder.

    Raises:
        OSError: it cannot be made.
    """
    return _made(folder, 0o700)


def make_own(folder: Path) -> Path:
    """As `make_private`, for what others may read, such as the jars of an image, but never write."""
    return _made(folder, 0o755)


def protect(folder: Path) -> None:
    """Take the right to write from others, for a folder and the files in it."""
    for each in (folder, *folder.iterdir()):
        each.chmod(each.stat().st_mode & ~_WRITTEN_BY_OTHERS)


def _made(folder: Path, mode: int) -> Path:
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    for each in reversed(missing):
        try:
            each.mkdir(mode=mode)
        except FileExistsError:  # another process has made it meanwhile
            continue
        except FileNotFoundError as refused:  # the folder above is there: this file system makes none, such as /proc
            raise PermissionError(errno.EACCES, "no folder can be made there", str(each)) from refused
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    return folder


def own_folder(folder: Path, variable: str = "TMPDIR") -> Path:
    """Make a folder whose name anybody can guess, or check that it is this user's.

    Args:
        variable: the environment variable that names another place, for the error.

    Returns:
        The folder, which nobody else may read.

    Raises:
        EnvironmentUnusableError: something else is there: a link, a file, or a folder of another user.
    """
    next_step = f"remove it, or name another place with ${variable}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentUnusableError(
            f"{folder} cannot be used as a folder of this user", detail=str(error), next_step=next_step
        ) from error
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid():
            raise EnvironmentUnusableError(
                f"{folder} belongs to another user (id {found.st_uid})",
                detail=f"this process runs as user id {os.geteuid()}",
                next_step=next_step,
            )
        if found.st_mode & 0o077:
            os.fchmod(opened, 0o700)
    finally:
        os.close(opened)
    return folder


def private_temporary() -> Path:
    """The folder of this user below the temporary folder.

    Raises:
        EnvironmentUnusableError: see `own_folder`.
    """
    return own_folder(Path(tempfile.gettempdir(), f"onceflow-{os.geteuid()}"))


def scratch_folder() -> Path:
    """A folder for logs and sockets of this process. If another user has taken the name of
    `private_temporary`, it is one with a name that nobody can guess."""
    try:
        return private_temporary()
    except EnvironmentUnusableError:
        return Path(tempfile.mkdtemp(prefix="onceflow-"))


def in_home(*parts: str) -> Path:
    """A folder below the user's home, which need not exist. If there is no home, or nothing can be written there, as
    with a user id that a container was given, or another user has made the folder: one below the temporary folder.

    Raises:
        EnvironmentUnusableError: see `own_folder`.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: no home at all
        home = Path.home()
        folder = home.joinpath(*parts)
        existing = folder
        while not existing.exists():
            existing = existing.parent
        # It may be there only to be read: jars may be part of an image.
        needed = os.R_OK | os.X_OK if existing == folder else os.W_OK | os.X_OK
        below = [home.joinpath(*parts[: n + 1]) for n in range(len(parts))]
        if existing.is_dir() and os.access(existing, needed) and all(_is_safe(each, home) for each in below):
            return folder
    return private_temporary().joinpath(*(part.lstrip(".") for part in parts))


def _is_safe(folder: Path, home: Path) -> bool:
    """Whether nobody can have put something into a folder but this user, the administrator, and who owns the home. If
    it is of this user, and others may write there, this right is taken from them."""
    if not folder.exists():
        return True
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _WRITTEN_BY_ALL:
        with suppress(OSError):  # a file system without rights, or one that is read only
            folder.chmod(found.st_mode & 0o7777 & ~_WRITTEN_BY_OTHERS)
        found = folder.stat()
    return found.st_uid in (0, os.geteuid(), home.stat().st_uid) and not found.st_mode & _WRITTEN_BY_ALL
