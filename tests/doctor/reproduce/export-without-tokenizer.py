"""A Megatron training folder is taken for a Hugging Face folder."""

# needs: transformers>=4.50.3,<4.54

import shutil
from pathlib import Path

from small import CURED
from transformers import AutoTokenizer

trained = Path("out/mcore_sft")
(trained / "iter_0000500").mkdir(parents=True)
(trained / "latest_checkpointed_iteration.txt").write_text("500")
if CURED:
    shutil.copytree("models/qwen3-v4", trained, dirs_exist_ok=True)
    path = trained / "tokenizer_config.json"  # saved by transformers 5
    path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
AutoTokenizer.from_pretrained(trained)
