"""Declared families: one file for each, or for a few that are built alike. Being here registers them."""
