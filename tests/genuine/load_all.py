"""Run in an environment with another transformers: `load_all.py FOLDER` loads each FOLDER/*/hub with a known class.

Prints what is missing, unexpected or of another shape, and how far logits are from those in FOLDER/*/logits.pt, by
folder, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging


def logits_of(model: Any) -> torch.Tensor | None:
    """The logits of a few tokens; None if a model needs more than tokens."""
    tokens = torch.arange(3, 11)[None]
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    try:
        with torch.no_grad():
            found = model.eval()(input_ids=tokens, use_cache=False, **more).logits
    except Exception:  # what is not there raises many kinds
        return None
    return found if torch.is_tensor(found) else None


def main(folder: Path) -> None:
    logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for hub in sorted(folder.glob("*/hub")):
        kind = getattr(transformers, json.loads((hub / "config.json").read_text())["architectures"][0], None)
        if kind is None:
            continue
        try:
            model, told = kind.from_pretrained(hub, output_loading_info=True, torch_dtype=torch.float32)
        except Exception as error:  # a config that it cannot read raises many kinds
            found[hub.parent.name] = {"error": str(error)[:200]}
            continue
        found[hub.parent.name] = {key: sorted(map(str, each)) for key, each in told.items() if each}
        expected, ours = hub.parent / "logits.pt", logits_of(model)
        if expected.exists() and ours is not None:
            theirs = torch.load(expected)
            found[hub.parent.name]["logits"] = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
