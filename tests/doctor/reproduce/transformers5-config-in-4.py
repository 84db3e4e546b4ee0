"""A config of transformers 5 loses its RoPE base in transformers 4."""

# needs: transformers>=4.50.3,<4.54

import json
from pathlib import Path

from transformers import AutoConfig

saved = json.loads(Path("models/qwen3-rope/config.json").read_text())
assert saved["rope_parameters"]["rope_theta"] == 1e6 and saved["dtype"] == "float32"
opened = AutoConfig.from_pretrained("models/qwen3-rope")
assert opened.rope_theta == 1e4 and opened.torch_dtype is None
