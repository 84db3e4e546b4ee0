"""Plans for machines that are not here: which fit, and which of them is the fastest."""
