"""How rows of state are stored: their keys and contents, stamped rows and segments, and JSON that keeps every number.

It may import nothing else of ours. Start reading at ``rows.py``.
"""
