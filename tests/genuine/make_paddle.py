"""Models as Paddle's libraries save them: `python -m tests.genuine.make_paddle LIBRARY CASES`, where it is installed.

CASES is a JSON list of [Hugging Face folder, new folder, settings of the model, arguments of `save_pretrained`]. The
logits of `TOKENS` are saved beside, as logits.npy, unless the library does not compute the model on a CPU.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

TOKENS = [[5, 17, 99, 3, 41, 200, 11, 7]]
FROM_HUB = {"paddlenlp": "convert_from_torch", "paddleformers": "convert_from_hf"}


def main(library: str, cases: str) -> None:
    """Load each model with Paddle, and save it as Paddle does."""
    import numpy as np
    import paddle

    models = import_module(f"{library}.transformers")
    for source, out, settings, how in json.loads(cases):
        options = {"dtype": "float32", FROM_HUB[library]: True, **settings}
        model = models.AutoModelForCausalLM.from_pretrained(source, **options)
        model.eval()
        model.save_pretrained(out, **how)
        try:
            with paddle.no_grad():
                logits = model(input_ids=paddle.to_tensor(TOKENS))
        except (TypeError, ValueError) as error:
            print(f"{source}: no logits: {error}")
            continue
        logits = logits[0] if isinstance(logits, tuple | list) else getattr(logits, "logits", logits)
        np.save(f"{out}/logits.npy", logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
