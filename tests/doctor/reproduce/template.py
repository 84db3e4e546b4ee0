"""The tokenizer has no chat template."""

from small import CURED, tokenizer

bare = tokenizer()
if not CURED:
    bare.chat_template = None
bare.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
