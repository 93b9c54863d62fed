"""A batch, whatever its steps and its sink: its rows, its attempts, the check of its reports, and its errors.

It may import ``driver/record``. Start reading at ``batches.py``.
"""
