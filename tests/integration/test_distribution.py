"""What is built for others: the wheel of onceflow, and that of its demos, chaos runs and benchmarks (the workshop)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    file for kind in ("py", "html") for file in ROOT.glob(f"examples/*/*.{kind}") if not file.name.startswith("test_")
)
# What git ignores, and git's own. Virtual environments (``.venv*``) are left out as well.
NOT_OURS = {
    ".git",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
}


def build(root: Path, target: str, folder: Path) -> Path:
    """The archive that the build backend makes of a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("onceflow*")
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        # RECORD has the checksums of the others.
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "workshop", "wheel", tmp_path_factory.mktemp("workshop"))


def files_of(sources: Path) -> dict[str, bytes]:
    files = [file for file in sources.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {file.relative_to(sources).as_posix(): file.read_bytes() for file in files}


def without_metadata(wheel: Path) -> dict[str, bytes]:
    return {name: text for name, text in contents(wheel).items() if ".dist-info/" not in name}


def test_a_wheel_has_the_package_alone(wheel: Path) -> None:
    found = without_metadata(wheel)
    assert found == files_of(ROOT / "src")
    assert not [name for name in found if re.search(r"/(bench|chaos|demos)/", name)]


def test_the_wheel_of_the_workshop_has_the_example_services(workshop: Path) -> None:
    expected = files_of(ROOT / "workshop" / "src")
    assert len(EXAMPLES) >= 9
    expected |= {f"onceflow_workshop/demos/{file.relative_to(ROOT).as_posix()}": file.read_bytes() for file in EXAMPLES}
    assert without_metadata(workshop) == expected


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, "sdist", tmp_path / "sdist")) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
        # With a filter where Python has one: 3.14 wants it, 3.10.0 does not know it.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.glob("onceflow-*")
    assert contents(build(unpacked, "wheel", tmp_path / "wheel")) == contents(wheel)


def test_the_image_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Of what the Dockerfile copies to ``/src``."""
    for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines():
        if not line.startswith("COPY ") or "/src/" not in line:
            continue
        *sources, target = shlex.split(line)[1:]
        folder = tmp_path / "image" / target.removeprefix("/src/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    assert contents(build(tmp_path / "image", "wheel", tmp_path / "wheel")) == contents(wheel)


def test_an_editable_install_has_no_copies(tmp_path: Path) -> None:
    """A copy would be out of date with the next change in the checkout."""
    code = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    for root in (ROOT, ROOT / "workshop"):
        folder = tmp_path / root.name
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-c", code, str(folder)], cwd=root, check=True, capture_output=True, timeout=120
        )
        (built,) = folder.glob("onceflow*.whl")
        assert [Path(name).suffix for name in without_metadata(built)] == [".pth"]


@pytest.mark.parametrize("installed", ["wheel", pytest.param("editable", marks=pytest.mark.long)])
def test_the_demos_find_their_services(workshop: Path, tmp_path: Path, installed: str) -> None:
    """As installed from a wheel, and from a checkout: the files are there."""
    place, folder = ROOT / "workshop" / "src", ROOT
    if installed == "wheel":
        place, folder = tmp_path / "site", tmp_path / "site" / "onceflow_workshop" / "demos"
        with zipfile.ZipFile(workshop) as archive:
            archive.extractall(place)
    code = (
        "from onceflow_workshop.demos import deposits, files, guarantees, moving_average, pairs, retry\n"
        "print(deposits.SERVICE, files.SERVICE, guarantees.COPY_SERVICE, moving_average.SERVICE, sep='\\n')\n"
        "print(pairs.SERVICE, pairs.SPARK_SERVICE, retry.SERVICE, sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(place)}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    scripts = [Path(line) for line in answer.stdout.splitlines()]
    names = ["deposits/deposits", "files/files", "moving-average/moving_average", "pairs/pairs", "pairs/pairs_spark"]
    expected = [folder / "examples" / f"{name}.py" for name in (*names, "retry/retry")]
    assert sorted(scripts) == sorted([*expected, place / "onceflow_workshop" / "demos" / "copy_service.py"])
    assert all(script.is_file() for script in scripts)
    # The one that imports files beside it.
    command = [sys.executable, str(folder / "examples" / "files" / "files.py"), "--help"]
    usage = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert usage.stdout.startswith("usage: files.py ")


def test_the_repository_has_no_symbolic_links() -> None:
    """A zip download and a checkout on Windows turn them into text files."""
    links = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.startswith(".venv")]
        links += [Path(folder) / name for name in (*folders, *files) if (Path(folder) / name).is_symlink()]
    assert links == []


#: What needs the extra `testing`.
TOOLS = ("testing",)
_WITHOUT = """
import importlib, sys
sys.modules["confluent_kafka"] = None  # an import of it fails
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_flows_and_commands_need_no_client_of_librdkafka() -> None:
    """It is an extra. The pytest plugin, which comes with onceflow, and the local broker do without it, too."""
    source = ROOT / "src" / "onceflow"
    paths = [path.relative_to(source.parent).with_suffix("") for path in source.rglob("*.py")]
    modules = [".".join(path.parts) for path in paths if path.parts[1] not in TOOLS and path.name != "__init__"]
    # These load what other extras bring.
    modules = [name for name in modules if not name.startswith("onceflow.server.")]
    modules += ["onceflow.testing.plugin", "onceflow.testing.broker", "onceflow.testing.processor_driver"]
    command = [sys.executable, "-c", _WITHOUT, *modules]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.parametrize("command", ["bench", "chaos", "demo"])
def test_a_command_of_the_workshop_says_what_to_install(command: str) -> None:
    code = (
        "import importlib.metadata as m; m.entry_points = lambda **_: []\n"
        f"from onceflow.cli.main import main; main([{command!r}])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2
    assert "is a command of the package onceflow-workshop: pip install ./workshop in a checkout" in ran.stderr


def test_commands_of_other_packages_do_not_break_those_of_onceflow() -> None:
    code = (
        "import importlib.metadata as m\n"
        "broken = m.EntryPoint('broken', 'no_such_package:COMMANDS', 'onceflow.commands')\n"
        "hers = m.EntryPoint('hers', 'json:JSONDecoder', 'onceflow.commands')\n"
        "m.entry_points = lambda **_: [broken, hers]\n"
        "from onceflow.cli.main import main; main(['--help'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0
    assert "verify" in ran.stdout
    assert "the commands of 'no_such_package:COMMANDS' cannot be loaded" in ran.stderr
    assert "the commands of 'json:JSONDecoder' cannot be loaded" in ran.stderr
