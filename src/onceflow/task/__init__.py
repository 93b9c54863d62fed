"""The code of a batch that runs in tasks: it writes rows, runs process steps, and reports to the driver.

It may import ``state``, ``client``, ``calls``, ``external`` and what is below them; nothing of the driver.
Start reading at ``row_writer.py``.
"""
