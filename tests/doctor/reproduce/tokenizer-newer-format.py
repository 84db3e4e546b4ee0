"""A tokenizer that today's tokenizers saved, read by an old one."""

# needs: tokenizers<0.20

from small import MODEL
from transformers import PreTrainedTokenizerFast

PreTrainedTokenizerFast.from_pretrained(MODEL)
