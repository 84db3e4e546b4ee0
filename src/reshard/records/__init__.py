"""What reshard notes in a folder that it writes, and which files there it may replace."""
