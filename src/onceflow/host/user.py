"""The user that this process runs as."""

from __future__ import annotations

import os
import pwd

from onceflow.errors import EnvironmentUnusableError


def check_user() -> None:
    """Check that the user id has a name. Spark's JVM asks for it (UnixLoginModule of Hadoop), and does not start
    without one. Containers that run as any user id, as those of OpenShift, have none in /etc/passwd.

    Raises:
        EnvironmentUnusableError: it has none.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise EnvironmentUnusableError(
            f"User id {number} has no entry in /etc/passwd, which Spark's JVM needs",
            next_step="add one when the container starts: "
            'echo "app:x:$(id -u):0::${HOME:-/tmp}:/bin/sh" >> /etc/passwd (the image has to give group 0 the '
            "permission to write the file); or use nss_wrapper",
        ) from None
