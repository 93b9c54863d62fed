"""The checks of ``onceflow doctor``: first the facts are read, then each check is a function of them.

It may import ``admin/status`` and what that imports. Start reading at ``checks.py``.
"""
