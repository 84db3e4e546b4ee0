"""save_pretrained refuses a contradictory generation config."""

from small import CURED, load

model = load()
model.generation_config.temperature = 0.7
model.generation_config.do_sample = CURED
model.save_pretrained("out/saved")
