"""The folder at the end of a run: made, and checked."""
