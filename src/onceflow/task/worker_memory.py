"""The memory of a Python worker of Spark: what stays is not looked through after each task.

Spark collects the garbage of all generations after each task (``gc.collect()`` in ``pyspark/daemon.py``). With our
modules and caches loaded, this took more than half of the CPU time of a worker whose tasks have 500 records.
"""

from __future__ import annotations

import gc

#: Before these tasks of a process, all that is there is moved to the permanent generation. After the first task the
#: modules are imported and the stores are open. The later ones are for what further flows have brought. There are only
#: a few, because cycles of what was moved are never freed.
FREEZES_BEFORE = frozenset({2, 16, 128})

_tasks = 0


def task_begins() -> None:
    """Called at the start of each task, in the process of its Python worker."""
    global _tasks
    _tasks += 1
    if _tasks in FREEZES_BEFORE:
        gc.collect()
        gc.freeze()
