"""A sharded parameter is copied into a plain one, or the other way round."""

# processes: 2

from small import CURED, join, load, shard

join()
model, plain = shard(load()), load()
weight = model.lm_head.weight
plain.lm_head.weight.data.copy_(weight.full_tensor() if CURED else weight)
