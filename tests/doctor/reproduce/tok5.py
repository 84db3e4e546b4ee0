"""A tokenizer saved by transformers 5 is opened by transformers 4."""

# needs: transformers>=4.50.3,<4.54

from small import CURED, copied, edited
from transformers import AutoTokenizer

folder = copied("qwen3")
if CURED:
    edited(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
AutoTokenizer.from_pretrained(folder)
