"""A .distcp file is missing."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from small import load

model = load()
dcp.save({"model": model.state_dict()}, checkpoint_id="out/dcp")
Path("out/dcp/__0_0.distcp").unlink()
dcp.load({"model": model.state_dict()}, checkpoint_id="out/dcp")
