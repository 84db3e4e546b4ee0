"""Distributed fine-tuning that avoids known failures, and ends in a Hugging Face folder.

`run.py` describes a run, `preflight.py` checks whether it can start, `preflight_report.py` describes what it will do,
`launching/` starts the ranks, `worker.py` runs on each rank, `engine_registry.py` lists the engines, `show/` displays
the progress, `finish.py` makes and checks the folder at the end. Importing this package imports neither torch nor an
engine.
"""
