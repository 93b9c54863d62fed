"""Claim check: large values are kept in storage, and references to them travel through Kafka.

It may import ``state/api`` for serdes, ``spark`` for columns, ``object_storage``, and what is below them.
Start reading at ``claim.py``.
"""
