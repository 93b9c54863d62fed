"""A batch that is written to Kafka: its tasks write outputs, and one transaction decides them under each guarantee.

It may import ``record``, ``batch`` and ``step`` of the driver. Start reading at ``commit.py``, then ``delivery.py``.
"""
