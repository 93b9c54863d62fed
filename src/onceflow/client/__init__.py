"""Sockets: everything that talks to a broker. Formats live in ``onceflow.protocol``."""
