"""The version of reshard."""

__version__ = "0.3.0"
