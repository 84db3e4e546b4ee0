"""tokenizer.json was written by a newer tokenizers library."""

# needs: transformers>=4.35,<4.36

from transformers import PreTrainedTokenizerFast

PreTrainedTokenizerFast(tokenizer_file="models/qwen3/tokenizer.json")
