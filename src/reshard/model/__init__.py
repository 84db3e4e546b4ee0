"""Identify the model in a checkpoint, and its tensors under their Hugging Face names."""
