"""GGUF, the single file of llama.cpp: metadata, tokenizer and tensors."""
