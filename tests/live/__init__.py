"""Weights in running inference engines."""
