"""The state API for user code: processors, their state, maps, lists, timers and serdes.

It may import ``state/stores`` and ``state/format``. Start reading at ``processor.py``.
"""
