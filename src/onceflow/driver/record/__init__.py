"""The progress record of a flow: its log, the transactional id that guards it, and Spark's offset log beside it.

It may import no other room of the driver. Start reading at ``progress_log.py``.
"""
