"""Pauses of Python's garbage collector, while a flow runs that commits many times a second.

A full collection looks at every object of the process: the modules and caches of Spark, pandas and Arrow alone take 0.1
seconds and more, again and again, and they are never garbage. They are set aside while a flow runs.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_users = 0


class SetAside:
    """What is in memory at a moment, without what is garbage then, is left out of collections until it is released.

    Several users share one state: the first one sets aside, the last one releases.
    """

    def __init__(self) -> None:
        self._held = False

    def hold(self) -> None:
        """Set aside what is there now. This takes as long as one full collection. A second call does nothing.

        Nor does the first one if the program decides about collections itself.
        """
        global _users
        with _lock:
            if self._held or not gc.isenabled() or (not _users and gc.get_freeze_count()):
                return
            self._held = True
            _users += 1
            if _users == 1:
                gc.collect()
                gc.freeze()

    def release(self) -> None:
        """Let collections look at everything again."""
        global _users
        with _lock:
            if not self._held:
                return
            self._held = False
            _users -= 1
            if not _users:
                gc.unfreeze()
