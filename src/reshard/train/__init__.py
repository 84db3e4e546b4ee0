"""Distributed fine-tuning that cannot fall into the known traps, and ends in a Hugging Face folder.

`run.py` says what is to be done, `preflight.py` whether it can be, `outlook.py` what it will do, `launching/` starts
the ranks, `worker.py` is what each rank runs, `engines.py` lists the engines, `show/` tells how it goes, `final/` makes
the folder at the end and checks it. Importing this package imports neither torch nor an engine.
"""
