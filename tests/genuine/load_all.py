"""Run in an environment with another transformers: `load_all.py FOLDER` loads each FOLDER/*/hub with a known class.

Prints what is missing, unexpected or of another shape, by folder, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.utils import logging


def main(folder: Path) -> None:
    logging.set_verbosity_error()
    found = {}
    for hub in sorted(folder.glob("*/hub")):
        kind = getattr(transformers, json.loads((hub / "config.json").read_text())["architectures"][0], None)
        if kind is None:
            continue
        try:
            _, told = kind.from_pretrained(hub, output_loading_info=True, torch_dtype=torch.float32)
            found[hub.parent.name] = {key: sorted(map(str, each)) for key, each in told.items() if each}
        except Exception as error:  # a config that it cannot read raises many kinds
            found[hub.parent.name] = {"error": str(error)[:200]}
    print(json.dumps(found))


main(Path(sys.argv[1]))
