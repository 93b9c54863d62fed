"""Local copies of table partitions: their format, how they are restored from Kafka, and how they are read.

It may import ``state/stores`` and ``state/format``. Start reading at ``opening.py``.
"""
