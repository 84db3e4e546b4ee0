"""The loss depends on no trainable parameter."""

from small import CURED, load, tokens

model = load()
model.requires_grad_(CURED)
model(input_ids=tokens(), labels=tokens()).loss.backward()
