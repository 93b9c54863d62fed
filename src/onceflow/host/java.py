"""Which Java to run, found the way Spark finds it: JAVA_HOME first, then PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from onceflow.errors import EnvironmentUnusableError

MAJOR_MIN = 17
VERSION_TIMEOUT_S = 30


def find_java() -> Path:
    """The java executable to use, at least version 17.

    Raises:
        EnvironmentUnusableError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise EnvironmentUnusableError(
                f"JAVA_HOME is {home}, which has no bin/java.",
                next_step=f"Set JAVA_HOME to a Java {MAJOR_MIN} or later, or unset it.",
            )
    else:
        found = shutil.which("java")
        if found is None:
            raise EnvironmentUnusableError(
                "Java was not found: JAVA_HOME is not set and there is no java on PATH.",
                next_step=f"Install Java {MAJOR_MIN} or later, or set JAVA_HOME.",
            )
        java = Path(found)
    version = _version(java)
    major = major_version(version)
    if major is None or major < MAJOR_MIN:
        raise EnvironmentUnusableError(
            f"{java} is Java {version or 'of an unknown version'}; {MAJOR_MIN} or later is needed.",
            next_step=f"Install Java {MAJOR_MIN} or later, or set JAVA_HOME to one.",
        )
    return java


def major_version(version: str) -> int | None:
    """17 of ``17.0.15``, 8 of ``1.8.0_392``, 22 of ``22-ea``; None when it is no version."""
    match = re.match(r"(?:1\.)?(\d+)", version)
    return int(match[1]) if match else None


def _version(java: Path) -> str:
    # Every JDK and JRE since 9 has this file beside bin/; asking java itself costs a JVM start.
    release = java.resolve().parent.parent / "release"
    try:
        match = re.search(r'^JAVA_VERSION="([^"]+)"', release.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return match[1]
    try:
        answer = subprocess.run(
            [str(java), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    return match[1] if match else ""


def with_flags(options: str, flags: Sequence[str]) -> str:
    """JVM options as Spark takes them in one text, with more flags behind them."""
    return " ".join(filter(None, [options, *(f'"{flag}"' if " " in flag else flag for flag in flags)]))
