"""Finds Java in the same way as Spark: JAVA_HOME first, then PATH."""

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
    """The java executable to use, of version 17 or later.

    Raises:
        EnvironmentUnusableError: Java was not found, or is too old.
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
    version = java_version(java)
    major = major_version(version)
    if major is None or major < MAJOR_MIN:
        raise EnvironmentUnusableError(
            f"{java} is Java {version or 'of an unknown version'}; {MAJOR_MIN} or later is needed.",
            next_step=f"Install Java {MAJOR_MIN} or later, or set JAVA_HOME to one.",
        )
    return java


def major_version(version: str) -> int | None:
    """The major version: 17 for ``17.0.15``, 8 for ``1.8.0_392``, 22 for ``22-ea``; None if the text is no version."""
    match = re.match(r"(?:1\.)?(\d+)", version)
    return int(match[1]) if match else None


def java_version(java: Path) -> str:
    """The version of a java executable; empty if it cannot be found out."""
    # Every JDK and JRE since Java 9 has this file next to bin/. Running java instead would start a JVM.
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
    """JVM options as one text, in Spark's format, with more flags added at the end."""
    return " ".join(filter(None, [options, *(f'"{flag}"' if " " in flag else flag for flag in flags)]))
