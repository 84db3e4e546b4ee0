"""Checks of a command before it starts."""
