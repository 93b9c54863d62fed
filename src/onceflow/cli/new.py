"""``onceflow new``: a small project that works and is tested, to begin with."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import shlex
import sys
from pathlib import Path

import click

from onceflow._version import __version__
from onceflow.errors import OptionError

# Lines of the templates have room for it, so that what is generated is formatted whatever the name.
NAME_LENGTH_MAX = 40
_TEMPLATES = Path(__file__).parents[1] / "templates" / "project"
_SUFFIX = ".tmpl"  # keeps formatters and pytest away from files with placeholders
_MODULE_FOLDER = "MODULE"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@click.command()
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Folder to write, which must be empty or not exist.  [default: NAME]",
)
def new(name: str, directory: Path | None) -> None:
    """Write a small project NAME: a service with state, its tests and a Makefile.

    The service counts orders per customer. Its tests pass as they are; change it to what you need.
    """
    folder = Path(name) if directory is None else directory
    written = write_project(name, folder)
    click.echo(f"Project {name} in {folder}:")
    for path in written:
        click.echo(f"  {path}")
    click.echo(f"Next: cd {shlex.quote(str(folder))} && make test")


def write_project(name: str, folder: Path) -> list[Path]:
    """Write the project.

    Args:
        name: of the project; the module is called so, too, with ``_`` for ``-`` and in lower case.
        folder: to write it to.

    Returns:
        the files, relative to the folder.

    Raises:
        OptionError: a name that cannot be one, or a folder that has something in it or cannot be written.
    """
    module = module_name(name)
    _check_empty(folder)
    values = {"name": name, "module": module, "onceflow": requirement(__version__)}
    written = []
    try:
        for template in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}")):
            parts = template.relative_to(_TEMPLATES).with_suffix("").parts
            path = Path(*(module if part == _MODULE_FOLDER else part for part in parts))
            text = _PLACEHOLDER.sub(lambda found: values[found[1]], template.read_text(encoding="utf-8"))
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise OptionError(
            f"The project cannot be written to {folder}",
            detail=f"{type(error).__name__}: {error}",
            next_step="remove what is there of it, and give --directory a folder that you may write to",
        ) from error
    return written


def module_name(name: str) -> str:
    """The name of the project's module.

    Raises:
        OptionError: it is no name, or that of a module that is there already.
    """
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) is None or len(name) > NAME_LENGTH_MAX or name.endswith("-"):
        raise OptionError(
            f"{name!r} is not a name for a project",
            next_step=f"begin with a letter, then letters, digits, - and _, at most {NAME_LENGTH_MAX}, no - at the end",
        )
    module = name.replace("-", "_").lower()
    if keyword.iskeyword(module):
        taken = "a keyword of Python"
    elif module in sys.stdlib_module_names:
        taken = "a module of Python's standard library"
    elif module in {"onceflow", "tests"} | importlib.metadata.packages_distributions().keys():
        taken = "a module that is installed, or that the project has already"
    else:
        return module
    raise OptionError(
        f"A project {name!r} would have a module {module!r}, which is {taken}",
        next_step=f"take another name, for example {name}-service",
    )


def requirement(version: str) -> str:
    """The versions of onceflow that may take the place of this one."""
    major, minor = (int(part) for part in version.split(".")[:2])
    # Before 1.0 a new minor version may change what is public.
    end = f"{major + 1}" if major else f"0.{minor + 1}"
    return f"onceflow>={version},<{end}"


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"{folder} exists and is not an empty folder",
            next_step="take another name, or give --directory a folder that is empty or does not exist",
        )
