"""A batch that is written to another system: its transaction decides where the flow is, and Kafka follows.

It may import all rooms of the driver but ``driver/start``. Start reading at ``commit.py``.
"""
