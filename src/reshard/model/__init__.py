"""Which model a checkpoint holds, and its tensors under their Hugging Face names."""
