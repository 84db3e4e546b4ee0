"""The version of reshard."""

__version__ = "0.1.0"
