"""Demos: real services, run with crashes, and an audit of what came out. ``onceflow demo NAME``."""
