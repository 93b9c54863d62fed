"""The checks of ``onceflow doctor`` of this machine. They run also if packages are missing that flows need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onceflow.admin.doctor_disk import check_disk, check_local_state
from onceflow.admin.doctor_local import (
    Host,
    check_connector,
    check_java,
    check_open_files,
    check_packages,
    check_python,
    check_spark,
)
from onceflow.admin.finding import Check, Finding, Level, examine

LOCAL: tuple[Check[Host], ...] = (
    Check("python", check_python),
    Check("java", check_java),
    Check("spark", check_spark),
    Check("connector", check_connector),
    Check("packages", check_packages),
    Check("open-files", check_open_files),
    Check("disk", check_disk),
    Check("local-state", check_local_state),
)
#: The connection itself is no function of facts: without it there are none.
CONNECTION = "connection"


def this_machine(state_dirs: Sequence[Path]) -> Host:
    """This machine.

    Args:
        state_dirs: folders of local state; empty: the default one.
    """
    try:
        from onceflow.session import configured_settings

        configured = configured_settings()
    except ImportError:  # a check says what is missing
        configured = {}
    if not state_dirs:
        try:
            from onceflow.state.local.format import default_state_dir

            state_dirs = (default_state_dir(),)
        except ImportError:
            pass
    return Host(tuple(state_dirs), configured)


def local_findings(host: Host) -> Iterator[Finding]:
    """What there is to say of this machine."""
    return examine(LOCAL, host)


def not_importable(problem: ImportError) -> Finding:
    """The finding if the modules that talk to Kafka cannot be imported."""
    return Finding(
        Level.ERROR,
        "Python",
        f"nothing of Kafka was checked: {problem}",
        "install the packages named above",
        CONNECTION,
    )
