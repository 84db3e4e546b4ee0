"""The folder around weights: which files belong to it, where they may lead, and what others noted there."""
