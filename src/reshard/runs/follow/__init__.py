"""Follow a run: each step, once it is complete, becomes a folder, a branch on the Hub, or the input of a command."""
