"""The operators of a batch that need the driver: process steps, joined tables, and calls of other services.

It may import ``driver/record`` and ``driver/batch``. Start reading at ``state_step.py``.
"""
