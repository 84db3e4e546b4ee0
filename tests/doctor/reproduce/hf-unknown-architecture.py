"""transformers is too old for this model type."""

from small import copied, edited, load

folder = copied("qwen3")
edited(folder / "config.json", model_type="qwen9", architectures=["Qwen9ForCausalLM"])
load(folder)
