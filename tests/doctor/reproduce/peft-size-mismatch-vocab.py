"""The adapter was trained with a larger vocabulary than the base has."""

from peft import PeftModel
from small import CURED, load, with_lora

model = load()
model.resize_token_embeddings(520)
with_lora(model, modules_to_save=["embed_tokens", "lm_head"]).save_pretrained("out")
base = load()
if CURED:
    base.resize_token_embeddings(520)
PeftModel.from_pretrained(base, "out")
