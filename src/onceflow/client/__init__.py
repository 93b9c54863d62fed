"""The Kafka client: all code that communicates with brokers. Message formats are in ``onceflow.protocol``.

It may import ``protocol``. Start reading at ``cluster.py``.
"""
