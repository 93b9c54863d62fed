"""Windows over event time for processors: which windows there are, what they hold, and when they close.

It may import ``state/api`` and ``state/format``. Start reading at ``kinds.py``.
"""
