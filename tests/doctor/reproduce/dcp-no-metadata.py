"""The folder has no .metadata of torch's distributed checkpoint."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from small import load

model = load()
dcp.save({"model": model.state_dict()}, checkpoint_id="out/dcp")
Path("out/dcp/.metadata").unlink()
dcp.load({"model": model.state_dict()}, checkpoint_id="out/dcp")
