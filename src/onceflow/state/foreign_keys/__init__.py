"""``Flow.join_foreign_key``: two tables, of which the rows of one name a row of the other.

It is three processors, one behind the other in one transaction, as in KIP-213: by the key of the left row, by the
foreign key, and by the key of the left row again.

It may import ``state/api`` and ``state/format``. Start reading at ``processors.py``.
"""
