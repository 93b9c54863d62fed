"""Records and topics without a flow: they are read, written, shown as text, parked, replayed, and collected.

It may import no other room of ``admin``. Start reading at ``topic_records.py``.
"""
