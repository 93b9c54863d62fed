"""Runs a processor over one partition's part of a batch. It depends neither on Spark nor on Kafka.

It may import ``state/api``, ``state/windows``, ``calls`` and what is below them. Start reading at ``base.py``.
"""
