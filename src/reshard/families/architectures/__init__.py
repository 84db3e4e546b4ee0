"""Declared families: one file for each, or for a few similar ones. Modules here are registered automatically."""
