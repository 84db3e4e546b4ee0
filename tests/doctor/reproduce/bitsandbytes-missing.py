"""4-bit or 8-bit loading without bitsandbytes."""

from small import load
from transformers import BitsAndBytesConfig

load(quantization_config=BitsAndBytesConfig(load_in_4bit=True))
