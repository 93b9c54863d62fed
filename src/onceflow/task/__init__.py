"""The tasks' side of a batch: writing rows, running process steps, reporting."""
