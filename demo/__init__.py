"""A model's way from Hugging Face through Megatron-Core and back, with every step checked: `make demo`."""
