"""What vLLM answers for some models. Runs where vLLM is installed: `python -m tests.genuine.serve_vllm CASES OUT`.

CASES is a JSON list of arguments of `vllm.LLM`, with `reload` as a list of paths that replace the weights one after
the other. With `pictures`, one is shown with each prompt; `spoiled` is a file that changes once the checkpoint is
opened, or is deleted if `deleted`. OUT gets a list for each case: of its answers, and of those after each reload. An
error is a string.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = ([5, 17, 99, 3, 41], [200, 11, 7])
SETTINGS = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "dtype": "float32"}


def prompts_of(pictures: bool) -> list[dict[str, Any]]:
    """The prompts, each with another picture if there are any."""
    from PIL import Image

    prompts: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    for index, prompt in enumerate(prompts if pictures else ()):
        picture = Image.linear_gradient("L").rotate(90 * index).convert("RGB")
        prompt["multi_modal_data"] = {"image": picture}
    return prompts


def spoil(file: Path, deleted: bool) -> None:
    """Delete a file, or write other bytes into it, each time that reshard has opened a checkpoint."""
    import reshard as api

    opened = api.open

    def then(*args: Any, **options: Any) -> Any:
        weights = opened(*args, **options)
        if deleted:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(bytes(file.stat().st_size))
        return weights

    api.open = then


def answers(llm: Any, prompts: list[dict[str, Any]]) -> list[Any]:
    """The tokens that follow each prompt, with their log-probabilities and those of the prompt."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=8, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    found = []
    for each in llm.generate(prompts, how, use_tqdm=False):
        scores = [[one.logprob for one in place.values()] for place in each.prompt_logprobs[1:]]
        out = each.outputs[0]
        found.append([list(out.token_ids), out.cumulative_logprob, scores])
    return found


def reloaded(llm: Any, path: str | None, prompts: list[dict[str, Any]]) -> list[Any]:
    """The answers after the weights are replaced."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    llm.reset_prefix_cache()
    return answers(llm, prompts)


def attempt(do: Callable[[], Any]) -> Any:
    """What a call returns, or the text of its error."""
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def served(case: dict[str, Any]) -> list[Any]:
    """The answers of a case, and those after each reload; a failed one is followed by the answers it left."""
    from vllm import LLM

    paths, prompts = case.pop("reload", []), prompts_of(case.pop("pictures", False))
    if "spoiled" in case:
        spoil(Path(case.pop("spoiled")), case.pop("deleted", False))
    llm = attempt(lambda: LLM(**{**SETTINGS, **case}))
    if isinstance(llm, str):
        return [llm]
    found = [answers(llm, prompts)]
    for path in paths:
        found.append(attempt(lambda path=path: reloaded(llm, path, prompts)))  # type: ignore[misc]
        if isinstance(found[-1], str):
            found.append(answers(llm, prompts))
    return found


def main(cases: str, out: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for case in json.loads(cases):
        found.append(served(case))
        gc.collect()
        cleanup_dist_env_and_memory()  # a group of experts is made only with the first model
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core for each of two ranks
    main(*sys.argv[1:])
