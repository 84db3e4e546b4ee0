"""A round trip of a model from Hugging Face through Megatron-Core and back, with every step checked: `make demo`."""
