"""From the checkpoints of a run to a checked folder: which one is complete, its conversion, checks of the result."""
