"""Plans for machines that are not at hand: which ones fit, and which is fastest."""
