"""Audits of what a flow has committed: by ids, by a replay of its processor, and by its tables.

It may import ``admin/change`` and what that imports. Start reading at ``audit.py``.
"""
