"""``onceflow new``: creates a small project that works and has tests, to start from."""

from __future__ import annotations

import importlib.metadata
import json
import keyword
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click

from onceflow._version import __version__
from onceflow.cli.examples import examples
from onceflow.errors import OptionError

# Lines of the templates have room for such a name, so that generated files are always formatted.
NAME_LENGTH_MAX = 40
_TEMPLATES = Path(__file__).parents[1] / "templates" / "project"
_SUFFIX = ".tmpl"  # keeps formatters and pytest away from files with placeholders
_MODULE_FOLDER = "MODULE"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@examples("onceflow new order-counts && cd order-counts && make test")
@click.command()
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="The folder of the project. It must be empty, or not exist.  [default: NAME]",
)
def new(name: str, directory: Path | None) -> None:
    """Write a small project: a service with state, its tests and a Makefile.

    The service counts orders per customer. Its tests pass as they are; change it to what you need.
    """
    folder = Path(name) if directory is None else directory
    written = write_project(name, folder)
    click.echo(f"Project {name} in {folder}:")
    for path in written:
        click.echo(f"  {path}")
    found = source()
    if found.gone:
        click.echo(f"onceflow was installed from {found.gone}, which is not there any more.", err=True)
        click.echo("Say where it is now when you first run make: make test ONCEFLOW=/path/to/onceflow", err=True)
    click.echo(f"Next: cd {shlex.quote(str(folder))} && make test")


def write_project(name: str, folder: Path) -> list[Path]:
    """Write the project.

    Args:
        name: of the project. Its module has the same name in lower case, with ``_`` for ``-``.
        folder: where to write it.

    Returns:
        The files, relative to the folder.

    Raises:
        OptionError: the name is not allowed, or the folder is not empty or cannot be written.
    """
    module = module_name(name)
    _check_empty(folder)
    found = source()
    values = {
        "name": name,
        "module": module,
        "onceflow": requirement(__version__),
        "source": _in_makefile(found.install),
        "source_comment": found.comment,
    }
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
            next_step="remove the files that were written, and give --directory a folder that you may write to",
        ) from error
    return written


def module_name(name: str) -> str:
    """The name of the project's module.

    Raises:
        OptionError: the name is not allowed, or there is such a module already.
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
    """A requirement for the versions of onceflow that are compatible with this one."""
    major, minor = (int(part) for part in version.split(".")[:2])
    # Before 1.0 a new minor version may change what is public.
    end = f"{major + 1}" if major else f"0.{minor + 1}"
    return f"onceflow>={version},<{end}"


@dataclass(frozen=True)
class Source:
    """Where a project gets onceflow from.

    Args:
        install: the argument for pip: a requirement or a path.
        comment: for the Makefile, in one line.
        gone: where this onceflow was installed from, if that place no longer exists.
    """

    install: str
    comment: str
    gone: str = ""


def source() -> Source:
    """Where this onceflow was installed from: a checkout, a wheel or a repository, otherwise the package index."""
    package = Path(__file__).parents[1]
    return source_of(package, _direct_url(package))


def source_of(package: Path, direct_url: str | None) -> Source:
    """As `source`.

    Args:
        package: the folder of the package ``onceflow``.
        direct_url: pip's record of where it was installed from (PEP 610); None: from a package index.
    """
    published = requirement(__version__)
    index = Source(published, "ONCEFLOW says where onceflow comes from, when not from the package index")
    checkout = package.parents[1]
    if package.parent.name == "src" and _is_checkout(checkout):
        return _unpublished(str(checkout), published)
    if direct_url is None:
        return index
    source = json.loads(direct_url)
    url = str(source["url"])
    vcs = source.get("vcs_info")
    if vcs is not None:
        folder = f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
        return _unpublished(f"onceflow @ {vcs['vcs']}+{url}@{vcs['commit_id']}{folder}", published)
    if urlsplit(url).scheme != "file":
        return _unpublished(f"onceflow @ {url}", published)
    path = Path(unquote(urlsplit(url).path))
    if path.exists():
        return _unpublished(str(path), published)
    return Source(index.install, index.comment, gone=str(path))


def _unpublished(install: str, published: str) -> Source:
    return Source(
        install, f"ONCEFLOW is where the onceflow came from that made this project; once published: {published}"
    )


def _is_checkout(folder: Path) -> bool:
    try:
        return re.search(r'^name = "onceflow"$', (folder / "pyproject.toml").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _direct_url(package: Path) -> str | None:
    """pip's ``direct_url.json`` for the distribution of this package; None if there is none."""
    try:
        found = importlib.metadata.distribution("onceflow")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(found.locate_file("onceflow"))).resolve() != package.resolve():
        return None
    return found.read_text("direct_url.json")


def _in_makefile(text: str) -> str:
    """Quote a text as the value of a variable that a recipe of a Makefile uses in double quotes."""
    quoted = re.sub(r'([\\"`$])', r"\\\1", text)  # for the shell
    return quoted.replace("$", "$$").replace("#", r"\#")


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"{folder} exists and is not an empty folder",
            next_step="take another name, or give --directory a folder that is empty or does not exist",
        )
