"""Open transactions: whose they are, whether they hang, and how one is aborted.

It may import ``admin/records``. Start reading at ``open_transactions.py``.
"""
