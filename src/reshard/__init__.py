"""reshard: LLM weights between Hugging Face and every distributed-training checkpoint."""

__version__ = "0.1.0"
