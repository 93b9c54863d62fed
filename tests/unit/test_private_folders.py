"""Folders that only this user may read, whatever the umask is and whoever was there first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceflow.errors import EnvironmentUnusableError
from onceflow.host.private_folders import in_home, make_private, own_folder, private_temporary


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_each_missing_folder_is_private(tmp_path: Path) -> None:
    """`mkdir(parents=True, mode=...)` gives the mode to the last one only."""
    tmp_path.chmod(0o755)
    folder = make_private(tmp_path / "a" / "b" / "c")
    assert [mode(each) for each in (folder, folder.parent, folder.parent.parent, tmp_path)] == [0o700] * 3 + [0o755]
    folder.chmod(0o770)
    assert mode(make_private(folder)) == 0o770, "it was there, and may be shared on purpose"


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "b")


def test_a_folder_with_a_name_that_can_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folder(tmp_path / "mine")
    assert mode(folder) == 0o700
    folder.chmod(0o777)
    assert mode(own_folder(folder)) == 0o700, "it is this user's, so it is corrected"

    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(EnvironmentUnusableError, match=f"{name} cannot be used as a folder of this user"):
            own_folder(tmp_path / name)

    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(EnvironmentUnusableError, match="mine belongs to another user") as caught:
        own_folder(folder, "ONCEFLOW_STATE_DIR")
    assert "$ONCEFLOW_STATE_DIR" in caught.value.next_step


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user id that a container was given, which is in no list of users."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"onceflow-{os.geteuid()}"

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    assert in_home(".cache", "onceflow") == home / ".cache" / "onceflow"
    assert not (home / ".cache").exists(), "nothing is made"
    monkeypatch.setattr(Path, "home", none)
    assert in_home(".cache", "onceflow") == mine / "cache" / "onceflow"
    assert mode(mine) == 0o700
    monkeypatch.setattr(Path, "home", lambda: home / "nowhere")
    monkeypatch.setattr(os, "access", lambda path, how: path != home and path.exists())
    assert in_home(".cache", "onceflow") == mine / "cache" / "onceflow"
    assert private_temporary() == mine


def test_a_file_system_that_makes_no_folders() -> None:
    """Such as /proc: not an error that means that nothing is there yet."""
    with pytest.raises(PermissionError, match="no folder can be made there"):
        make_private(Path("/proc/nope/more"))
