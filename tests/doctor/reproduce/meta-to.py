"""A model on the meta device is moved without data."""

from accelerate import init_empty_weights
from small import CURED, MODEL
from transformers import AutoConfig, AutoModelForCausalLM

with init_empty_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
model.to_empty(device="cpu") if CURED else model.to("cpu")
