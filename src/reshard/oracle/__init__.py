"""The judges of `verify --logits`: frameworks' own code, which computes logits from a checkpoint."""
