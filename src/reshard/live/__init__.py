"""Weights into running models, without writing them first."""
