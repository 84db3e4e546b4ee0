"""The functions behind the commands, with the same names and arguments: one module for each."""
