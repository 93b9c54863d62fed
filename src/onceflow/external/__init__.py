"""Systems other than Kafka that a flow writes exactly once: what they must offer, and those that come with onceflow.

It may import ``options`` and ``object_storage``. Start reading at ``sink.py``.
"""
