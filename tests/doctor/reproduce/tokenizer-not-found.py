"""The folder has no tokenizer."""

# needs: transformers>=4.50.3,<4.54

from small import CURED, copied, edited
from transformers import AutoTokenizer

folder = copied("qwen3-v4")
if CURED:
    edited(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
else:
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
AutoTokenizer.from_pretrained(folder)
