"""The checks of ``onceflow doctor`` of this machine. They run also if packages are missing that flows need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onceflow.admin.doctor.disk import check_disk, check_local_state
from onceflow.admin.doctor.finding import Check, Finding, Level, examine, of_error
from onceflow.admin.doctor.local import (
    Host,
    check_connector,
    check_java,
    check_open_files,
    check_packages,
    check_python,
    check_session,
    check_spark,
)
from onceflow.errors import OnceflowError

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
#: It starts Spark, so it comes last, and only if there is no other error.
SESSION: Check[Host] = Check("session", check_session)
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


def local_findings(host: Host, *, session: bool = True) -> Iterator[Finding]:
    """What there is to say of this machine.

    Args:
        session: whether Spark is started, if there is no error before.
    """
    is_well = True
    for finding in examine(LOCAL, host):
        is_well &= finding.level is not Level.ERROR
        yield finding
    if session and is_well:
        yield from examine([SESSION], host)


def no_cluster(problem: OnceflowError) -> Finding:
    """The finding if it is not known which cluster is meant, or how to connect to it."""
    return replace(of_error("Kafka", problem), check=CONNECTION)


def not_importable(problem: ImportError) -> Finding:
    """The finding if the modules that talk to Kafka cannot be imported."""
    return Finding(
        Level.ERROR,
        "Python",
        f"nothing of Kafka was checked: {problem}",
        "install the packages named above",
        CONNECTION,
    )
