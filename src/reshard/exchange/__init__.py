"""Weights from a running trainer into running engines: which rank sends which elements to which rank.

A trainer is a checkpoint whose storages are the memory of its ranks; an engine is a target whose files are the
parameters of its ranks. Names, bindings and sharding are those of a conversion.
"""
