"""Runs of training: guarded, diagnosed, started from a recipe, shown to agents. No other part of reshard imports it."""
