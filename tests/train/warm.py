"""Imported last by the server of `forked.py`, so that its forks need not do it again: each saves 0.7 of 0.9 seconds."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand regular expressions of all models
gc.collect()
gc.freeze()  # accelerate collects garbage before it trains, and would look at all modules
