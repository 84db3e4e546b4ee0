"""What vLLM answers with adapters. Runs where vLLM is installed: `python -m tests.genuine.serve_adapters CASES OUT`.

CASES is a JSON list of arguments of `vllm.LLM`, with `adapters` as a list of PEFT folders. OUT gets a list for each
case: the answers without an adapter, then with each of them. An error is a string.

On a CPU, vLLM 0.32 loads adapters of experts, but has no kernels to apply them: those are for GPUs. For a model with
`experts`, torch does what the kernels do, with the weights and pairs that vLLM has put into its buffers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = ([5, 17, 99, 3, 41], [200, 11, 7])
SETTINGS = {
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 16,
    "skip_tokenizer_init": True,
}


def activated(both: Any, kind: str) -> Any:
    """The input of down, of gate and up; those of gpt-oss alternate."""
    import torch

    if kind != "swigluoai":
        gate, up = both.chunk(2)
        return torch.nn.functional.silu(gate) * up
    gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def experts_in_torch(self: Any, **given: Any) -> None:
    """`TritonExperts.apply`: every token through its experts, with the pairs of its adapter."""
    import torch

    hidden, w1, w2 = given["hidden_states"], given["w1"], given["w2"]
    context, kind = self._lora_context, given["activation"].value
    first, second = (
        torch.zeros(len(w1), 1) if each is None else each for each in (self.w1_bias, self.w2_bias)
    )
    slots = context.punica_wrapper.token_lora_indices
    slices = [*zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)]
    ((down_a, down_b),) = zip(context.w2_lora_a_stacked, context.w2_lora_b_stacked, strict=True)
    result = torch.zeros_like(hidden)
    for token, state in enumerate(hidden):
        slot = int(slots[token]) if token < len(slots) else -1
        for weight, expert in zip(
            given["topk_weights"][token], given["topk_ids"][token].tolist(), strict=True
        ):
            both = w1[expert] @ state + first[expert]
            if slot >= 0:
                both = both + torch.cat([b[slot, expert] @ (a[slot, expert] @ state) for a, b in slices])
            inner = activated(both, kind)
            out = w2[expert] @ inner + second[expert]
            if slot >= 0:
                out = out + down_b[slot, expert] @ (down_a[slot, expert] @ inner)
            result[token] += weight * out
    given["output"].copy_(result)


def answers(llm: Any, adapter: str | None, number: int) -> Any:
    """The tokens that follow each prompt, and the log-probabilities of the likeliest at each place; or the error."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    how = SamplingParams(max_tokens=6, temperature=0, logprobs=5, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    request = LoRARequest(f"adapter-{number}", number, adapter) if adapter else None
    try:
        if request:
            llm.llm_engine.add_lora(request)
        outputs = llm.generate(prompts, how, use_tqdm=False, lora_request=request)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [
        [
            list(out.token_ids),
            [{token: each.logprob for token, each in place.items()} for place in out.logprobs],
        ]
        for (out,) in (each.outputs for each in outputs)
    ]


def served(case: dict[str, Any]) -> list[Any]:
    """The answers of a case, without an adapter and with each."""
    from vllm import LLM
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    adapters = case.pop("adapters")
    if case.pop("experts", False):
        TritonExperts.apply = experts_in_torch
    try:
        llm = LLM(**{**SETTINGS, **case})
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [answers(llm, adapter, number) for number, adapter in enumerate([None, *adapters])]


def main(cases: str, out: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for case in json.loads(cases):
        found.append(served(case))
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # tests run side by side
    main(*sys.argv[1:])
