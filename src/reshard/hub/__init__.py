"""Upload the output of conversions to the Hugging Face Hub, with a model card that describes its origin."""
