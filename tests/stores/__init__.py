"""Destinations and sources that are not on a disk, each against a server that runs here."""
