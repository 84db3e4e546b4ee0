"""The version of reshard."""

__version__ = "0.2.0"
