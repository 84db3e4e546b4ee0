"""A model that already has an adapter gets another one."""

from small import CURED, load, with_lora

model = with_lora(load())
with_lora(model.unload() if CURED else model)
