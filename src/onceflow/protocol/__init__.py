"""Kafka formats as pure functions: no sockets, no Spark. Imports nothing of onceflow except errors.

It may import ``errors`` alone. Start reading at ``batches.py``.
"""
