"""Imports kafka-python once, outside of the rule that warnings are errors.

On Python 3.11 and 3.12 its import warns about ``importlib.resources.read_text``, which is not ours to mend.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.errors

__all__ = ["kafka"]
