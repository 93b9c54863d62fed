"""Commands for flows and topics: reset, repartition, parked records, reading and writing records.

It may import nothing by itself: each of its rooms says what it may import.
Start reading at ``status/flow_status_reader.py``.
"""
