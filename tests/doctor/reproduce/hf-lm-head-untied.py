"""lm_head is missing although config.json says the weights are not tied."""

from small import CURED, copied, edited, load

folder = copied("qwen3-tied")
edited(folder / "config.json", tie_word_embeddings=CURED)
load(folder)
