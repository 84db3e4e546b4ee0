"""The loss depends on no trainable parameter."""

from small import CURED, load, tokens, with_lora

model = with_lora(load())
model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
model.train()
if CURED:
    model.base_model.model.enable_input_require_grads()
else:
    model.base_model.model.disable_input_require_grads()
model(input_ids=tokens(), labels=tokens()).loss.backward()
