"""Uploading what was converted to the Hugging Face Hub, with a model card that says what it was made from."""
