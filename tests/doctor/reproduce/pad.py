"""The tokenizer has no padding token."""

from small import CURED, tokenizer

unpadded = tokenizer()
unpadded.pad_token = unpadded.eos_token if CURED else None
unpadded(["a", "a b c"], padding=True)
