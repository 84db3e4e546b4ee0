"""A shard that the index names is not in the folder."""

from small import CURED, load

load().save_pretrained("out/sharded", max_shard_size="200KB")
if not CURED:
    from pathlib import Path

    sorted(Path("out/sharded").glob("model-*.safetensors"))[1].unlink()
load("out/sharded")
