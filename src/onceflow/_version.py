"""The version of the package. It is defined only here."""

__version__ = "0.1.0"
