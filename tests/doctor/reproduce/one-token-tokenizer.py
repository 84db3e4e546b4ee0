"""A folder without tokenizer files gives a tokenizer of one token."""

from small import load
from transformers import AutoTokenizer

load().save_pretrained("out/without")
tokenizer = AutoTokenizer.from_pretrained("out/without")
assert len(tokenizer) == 1
assert tokenizer("What is the answer?").input_ids == []
