"""Tests of `reshard watch`."""
