"""A command while it runs: its output, its signals, and the guards of other nodes."""
