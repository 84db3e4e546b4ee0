"""`reshard serve`: checkpoints as repositories of the Hugging Face Hub, computed as they are read."""
