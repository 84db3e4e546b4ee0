"""After a run: why it failed, what it saved, how to continue, and the final folder."""
