"""What users give, checked: arguments, durations, points in time, sizes, names of columns.

It may import nothing of ours but ``errors``. Start reading at ``arguments.py``.
"""
