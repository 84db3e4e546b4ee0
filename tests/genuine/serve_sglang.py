"""What SGLang answers for some models: `python -m tests.genuine.serve_sglang CASES OUT`, where it is installed.

CASES is a JSON list of arguments of `sglang.Engine`, with `updates` as a list of arguments of its
`update_weights_from_disk`, called one after the other. OUT gets a list for each case: of its state, and of that after
each update, of which a refused one is a text and is followed by the state that it left. A state has the `answers`, and
of each rank the `weights`: a checksum for every parameter and buffer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = ([5, 17, 99, 3, 41], [200, 11, 7])
SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "context_length": 64,
    "max_total_tokens": 1024,
    "disable_radix_cache": True,
    "log_level": "info",
}
SAMPLING = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def answers(engine: Any) -> list[Any]:
    """The tokens that follow each prompt, with their log-probabilities and those of the prompt."""
    found = engine.generate(
        input_ids=[list(each) for each in PROMPTS],
        sampling_params=SAMPLING,
        return_logprob=True,
        logprob_start_len=0,
    )
    scores = ("input_token_logprobs", "output_token_logprobs")
    return [
        [each["output_ids"], *([score[:2] for score in each["meta_info"][name]] for name in scores)]
        for each in found
    ]


def weights(engine: Any) -> list[dict[str, str]]:
    """Checksums of the parameters and buffers of each rank, as SGLang computes them."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    request = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action="checksum"))
    fine, message, ranks, _ = engine.loop.run_until_complete(request)
    assert fine and ranks, message
    return [rank["checksums"] for rank in ranks]


def state(engine: Any) -> dict[str, Any]:
    return {"answers": answers(engine), "weights": weights(engine)}


def served(case: dict[str, Any]) -> list[Any]:
    """The states of a case."""
    import sglang

    updates = case.pop("updates", [])
    engine = sglang.Engine(**{**SETTINGS, **case})
    found: list[Any] = [state(engine)]
    for update in updates:
        fine, message, *_ = engine.update_weights_from_disk(**update)
        found += [state(engine)] if fine else [message, state(engine)]
    engine.shutdown()
    return found


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each of two ranks
    cases, out = sys.argv[1:]
    Path(out).write_text(json.dumps([served(case) for case in json.loads(cases)]))
