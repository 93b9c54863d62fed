"""Decisions that are made before anything is written.

It may import ``task``, whose orders it makes, and what is below it; nothing of the driver.
Start reading at ``write_options.py``.
"""
