"""use_cache is switched off for gradient checkpointing."""

from small import CURED, load, tokens

model = load()
model.gradient_checkpointing_enable()
model.train()
model(input_ids=tokens(), labels=tokens(), use_cache=not CURED)
