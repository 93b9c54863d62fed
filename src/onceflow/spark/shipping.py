"""Lets tasks find the modules in the folder of a program's script.

The driver's Python searches the folder of its script first, and folders that the program has put at the front of
``sys.path``. Tasks run in other processes, with another search path. With a local master these folders are added to
it. On a cluster the modules that the driver has loaded from these folders are sent to the executors, as one archive.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import sysconfig
import weakref
import zipfile
from collections.abc import Iterable
from pathlib import Path

from pyspark import SparkContext, SparkFiles
from pyspark.sql import SparkSession

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark.master import is_local

log = logging.getLogger("onceflow")

_VARIABLE = "PYTHONPATH"
# Installed on every host: driver and executors must have the same ones.
_INSTALLED = frozenset(("__main__", "onceflow", "pyspark", "py4j"))
_INSTALLED_FOLDERS = frozenset(("site-packages", "dist-packages"))
_COMPILED = frozenset((".so", ".pyd", ".dylib"))  # cannot be imported from an archive
_DATA_FILE_BYTES_MAX = 1 << 20
_ARCHIVE_BYTES_MAX = 32 << 20

_sent: weakref.WeakKeyDictionary[SparkContext, set[str]] = weakref.WeakKeyDictionary()


def share_modules(spark: SparkSession) -> None:
    """Let tasks import what the driver imports from the folders of its program.

    To be called before functions are applied to a DataFrame, because they keep the search path of that moment. To be
    called again when more modules may have been loaded. Without new modules it does nothing.

    Raises:
        EnvironmentUnusableError: the modules cannot be read, or Spark does not accept the archive.
    """
    if is_local(spark):
        _look_into(spark.sparkContext, program_folders())
    else:
        _send(spark.sparkContext, loaded_files(program_folders()))


def program_folders() -> list[str]:
    """Folders at the front of ``sys.path`` that belong to this program: that of its script, the current folder with
    ``-m``, and those that it has added. Folders of ``PYTHONPATH`` are left out, because workers get these, too."""
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    variable = {os.path.abspath(entry) for entry in os.environ.get(_VARIABLE, "").split(os.pathsep) if entry}
    found: list[str] = []
    for entry in sys.path:
        folder = os.path.abspath(entry)
        if os.path.realpath(folder) == library:
            break
        if folder not in variable and folder not in found and os.path.isdir(folder):
            found.append(folder)
    return found


def _look_into(context: SparkContext, folders: Iterable[str]) -> None:
    """Add folders to the search path of workers on this machine. Spark passes ``environment`` to all workers."""
    known = [entry for entry in context.environment.get(_VARIABLE, "").split(os.pathsep) if entry]
    new = [folder for folder in folders if folder not in known and os.pathsep not in folder]
    if new:
        context.environment[_VARIABLE] = os.pathsep.join([*known, *new])


def loaded_files(folders: Iterable[str]) -> dict[str, Path]:
    """Files of the modules that were loaded from folders, by their paths in an archive. Packages are complete."""
    roots = {folder for folder in folders if os.path.basename(folder) not in _INSTALLED_FOLDERS}
    found: dict[str, Path] = {}
    for name in {_outermost(name) for name in list(sys.modules)}:
        place, root = _place(name)
        if place is None or str(root) not in roots or name.partition(".")[0] in _INSTALLED:
            continue
        files = _package_files(place) if place.is_dir() else [place] if place.suffix == ".py" else []
        found.update((file.relative_to(root).as_posix(), file) for file in files)
    return found


def root_of(name: str) -> str | None:
    """The folder in which the driver has found a loaded module or its package."""
    place, root = _place(_outermost(name))
    return None if place is None else str(root)


def _outermost(name: str) -> str:
    """The outermost package of a module that has a file, or the module itself. Namespace packages have no file."""
    end = name.find(".")
    while end >= 0 and getattr(sys.modules.get(name[:end]), "__file__", None) is None:
        end = name.find(".", end + 1)
    return name if end < 0 else name[:end]


def _place(name: str) -> tuple[Path | None, Path]:
    """The file of a module or the folder of a package, and the search path folder in which it was found."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None, Path()
    place = Path(os.path.abspath(file))
    if hasattr(module, "__path__"):
        place = place.parent
    depth = name.count(".")
    return (place, place.parents[depth]) if depth < len(place.parents) else (None, Path())


def _package_files(package: Path) -> list[Path]:
    """All Python files of a package, and its small data files. No files if it has compiled modules: such a package must
    be installed on the executors, and an archive without these modules would hide it."""
    found: list[Path] = []
    for folder, inner, names in os.walk(package):
        inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
        for file in (Path(folder, name) for name in names):
            if file.suffix in _COMPILED:
                return []
            if file.is_file() and (file.suffix == ".py" or file.stat().st_size <= _DATA_FILE_BYTES_MAX):
                found.append(file)
    return found


def _send(context: SparkContext, files: dict[str, Path]) -> None:
    if not files:
        return
    try:
        size = sum(file.stat().st_size for file in files.values())
        if size > _ARCHIVE_BYTES_MAX:
            log.warning(
                "the modules beside the script are too large to be sent to the executors (%d files, %d MiB): "
                "install them there",
                len(files),
                size >> 20,
            )
            return
        contents = {name: file.read_bytes() for name, file in sorted(files.items())}
        digest = _digest(contents)
        sent = _sent.setdefault(context, set())
        if digest in sent:
            return
        # Spark deletes this folder with the application.
        archive = Path(SparkFiles.getRootDirectory(), "onceflow", f"onceflow-modules-{digest}.zip")
        archive.parent.mkdir(exist_ok=True)
        write_archive(archive, contents)
        context.addPyFile(str(archive))
    except OSError as error:
        raise EnvironmentUnusableError(
            "The modules beside the script cannot be packed for the executors",
            detail=f"{type(error).__name__}: {error}",
            next_step="install them where the executors run, and set PYTHONPATH to their folder on both sides",
        ) from error
    sent.add(digest)
    log.info("sent to the executors: %s", ", ".join(contents))


def _digest(contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def write_archive(archive: Path, contents: dict[str, bytes]) -> None:
    """Write a zip file that Python can import from. Folders have entries of their own, for namespace packages."""
    folders = {str(parent) + "/" for name in contents for parent in Path(name).parents if str(parent) != "."}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for folder in sorted(folders):
            out.writestr(zipfile.ZipInfo(folder), b"")
        for name, content in contents.items():
            out.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
