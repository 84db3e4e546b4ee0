"""torch's consolidation fills a lost shard with zeros."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

whole = torch.arange(1.0, 9).reshape(4, 2)
for first, last in ((0, 2), (3, 4)):  # the shard with row 2 was lost
    saved = json.dumps({"w": {"saved_offsets": [first, 0]}})
    save_file(
        {"w": whole[first:last].contiguous()},
        f"out/shard-{first:05d}-model-00001-of-00001.safetensors",
        {"format": "pt", "DCP_SHARDING_INFO": saved, "DCP_VERSION": "1.0"},
    )
Path("out/consolidated").mkdir()
consolidate_safetensors_files("out", "out/consolidated", fqn_to_index_mapping={"w": 1})
rows = load_file("out/consolidated/model-00001-of-00001.safetensors")["w"]
assert rows[2].tolist() == [0, 0] and torch.equal(rows[[0, 1, 3]], whole[[0, 1, 3]])
