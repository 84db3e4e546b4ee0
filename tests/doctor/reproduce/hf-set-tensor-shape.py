"""A tensor in the file has another shape than the model."""

from accelerate import init_empty_weights, load_checkpoint_in_model
from small import CURED, MODEL
from transformers import AutoConfig, AutoModelForCausalLM

with init_empty_weights():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(MODEL, vocab_size=512 if CURED else 640)
    )
load_checkpoint_in_model(model, MODEL, device_map={"": "cpu"})
