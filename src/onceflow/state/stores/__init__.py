"""Local stores for the rows of one table partition (LMDB, RocksDB, memory), and the uncommitted changes of a batch.

It may import ``state/format``. Start reading at ``base.py``.
"""
