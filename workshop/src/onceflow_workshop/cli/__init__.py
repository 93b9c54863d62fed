"""The commands ``onceflow demo``, ``onceflow chaos`` and ``onceflow bench``."""
