"""What the files of a run show, each with its line, for programs."""
