"""A new version beside the running one: it is forked, compared, and promoted.

It may import ``admin/verify`` and what that imports. Start reading at ``fork.py``.
"""
