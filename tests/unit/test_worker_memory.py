"""What a Python worker keeps is frozen after its first task, and what later tasks leave behind is still freed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
import weakref

from onceflow.task import worker_memory


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


gc.disable()
frozen = []
for task in range(1, 200):
    worker_memory.task_begins()
    frozen.append(gc.get_freeze_count())
    left = cycle()
    gc.collect()  # as Spark's daemon does after each task
    assert left() is None, task
steps = [task for task in range(2, 200) if frozen[task - 1] > frozen[task - 2]]
assert frozen[0] == 0, "imports of the first task are not there yet"
assert frozen[1] > 1000
assert max(steps) <= 128, "no end of it"
print("left", len(gc.get_objects()))
"""


def test_modules_are_frozen_and_garbage_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("left ")
