"""The direct engine: the driver fetches records and runs their batches; with a backlog, tasks of Spark do.

It may import the driver, but for process steps and external sinks, and what is below it.
Start reading at ``loop.py``.
"""
