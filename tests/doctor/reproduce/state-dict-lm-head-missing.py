"""load_state_dict misses lm_head.weight only."""

from small import CURED, load

model = load()
state = {name: tensor for name, tensor in model.state_dict().items() if CURED or "lm_head" not in name}
model.load_state_dict(state)
