"""Distributed fine-tuning that avoids known failures, and ends in a Hugging Face folder.

`run.py` describes a run, `preflight.py` checks whether it can start, `outlook.py` describes what it will do,
`launching/` starts the ranks, `worker.py` runs on each rank, `engines.py` lists the engines, `show/` displays the
progress, `final/` makes and checks the folder at the end. Importing this package imports neither torch nor an engine.
"""
