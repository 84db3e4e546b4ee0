"""A tied model saved from shards holds its head twice."""

# processes: 2

from small import join, load, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

join()
model = shard(load("models/qwen3-tied"))
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
assert model.config.tie_word_embeddings
assert state["lm_head.weight"].data_ptr() != state["model.embed_tokens.weight"].data_ptr()
