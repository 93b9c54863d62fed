"""Tables of other flows and programs that a flow joins with: each batch sees them at offsets that are fixed for it.

It may import ``state/local``, ``state/api`` and what is below them. Start reading at ``spec.py``.
"""
