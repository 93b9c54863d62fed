"""The driver's side of a flow: start-up, and the numbered steps of a batch.

It may import nothing by itself: each of its rooms says what it may import. Start reading at ``start/run.py``.
"""
