"""Which adapters vLLM and SGLang apply, and how they want them.

Both read PEFT folders with code of their own, and skip much of what they do not know: modules that they do not adapt,
keys of adapter_config.json, layouts of experts. Everything that an engine would skip is therefore a problem here.
Sources: `vllm/lora` of vLLM 0.32.0 (`peft_helper.py`, `lora_model.py`, `model_manager.py`, `lora_weights.py`), and
`sglang/srt/lora` of SGLang 0.5.23 (`lora.py`, `lora_config.py`, `mem_pool.py`, `utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.adapter_changes import GATE_UP, AdapterChanges, ScaledPair
from reshard.adapters.adapter_settings import merge_problems
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem
from reshard.formats.options import SERVING_ENGINES

VLLM, SGLANG, PEFT = SERVING_ENGINES

_STACKED_BY_VLLM = (
    "gpt_oss",
    "interns1_pro",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",
)
"""Model types of the classes with `is_3d_moe_weight`, which read stacked experts, and no others."""

_VLLM_RANK = 512
"""The highest `--max-lora-rank`."""

_TOWER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|\w*projector|connector|merger|aligner)\.")

_SGLANG_LINEARS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj"),
        *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz"),
    }
)
"""Linears that SGLang adapts in every model that has them: those in `_KNOWN_LORA_TARGET_MODULES`."""

_SGLANG_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Linears that SGLang fuses: it skips, or fails on, a pair of one that lacks those of the others."""

REMEDY = "leave out --for, and merge the adapter into its base to serve both as one model: --merge --base DIR"


@dataclass(frozen=True)
class ServingEngine:
    """What applies an adapter.

    `stacks` tells by the type of a model whether its experts are adapted as stacks. `uneven` says that modules may have
    pairs of different ranks and strengths, and `fused` are linears of which all are adapted, or none. `targets` are its
    own names in `target_modules`. `problems` are those of an adapter that it does not apply completely.
    """

    name: str
    title: str
    stacks: Callable[[str], bool]
    problems: Callable[[ServingEngine, Adapter, AdapterChanges, str], Iterator[Problem]]
    uneven: bool = True
    fused: tuple[tuple[str, ...], ...] = ()
    targets: Mapping[str, str] = field(default_factory=dict)

    def refused(self, tensor: str | None, found: str, rule: str) -> Problem:
        """The problem of something that the engine would skip."""
        return Problem(
            "adapter-engine-unable",
            f"{self.title} does not apply this part of the adapter",
            tensor=tensor,
            rule=rule,
            found=found,
            remedy=REMEDY,
        )


def _of_vllm(
    engine: ServingEngine, adapter: Adapter, changes: AdapterChanges, model_type: str
) -> Iterator[Problem]:
    yield from _extras(engine, adapter)
    for module, change in changes.matrix_changes():
        if change.pair.rank > _VLLM_RANK:
            yield engine.refused(module, f"rank {change.pair.rank}", f"the rank is at most {_VLLM_RANK}")
    for experts in changes.experts:
        if GATE_UP in experts.shapes and not engine.stacks(model_type):
            yield engine.refused(
                experts.module,
                f"model type {model_type}",
                "the model's class in vLLM must load LoRA of experts that the Hub stacks",
            )


def _of_sglang(
    engine: ServingEngine, adapter: Adapter, changes: AdapterChanges, model_type: str
) -> Iterator[Problem]:
    yield from _extras(engine, adapter)
    for module in changes.linears:
        if module.rpartition(".")[2] not in _SGLANG_LINEARS:
            yield engine.refused(module, "a pair", f"it adapts {', '.join(sorted(_SGLANG_LINEARS))}")
    for experts in changes.experts:
        if model_type == "gpt_oss":  # gate and up alternate, and SGLang has no such layout
            yield engine.refused(
                experts.module, "stacked experts of gpt-oss", "it adapts each expert by itself"
            )


def _extras(engine: ServingEngine, adapter: Adapter) -> Iterator[Problem]:
    """Problems of everything that is not a low-rank pair of a linear of the language model."""
    for problem in merge_problems(adapter.settings):
        yield replace(
            problem,
            code="adapter-engine-unable",
            message=f"{engine.title} does not apply adapters of this kind",
            rule="it applies pairs only",
            remedy=REMEDY,
        )
    for name in adapter.whole:
        yield engine.refused(name, "a weight that was trained without LoRA", "it applies pairs only")
    for module, pair in adapter.pairs.items():
        for what in _other_parts(pair):
            yield engine.refused(module, what, "it applies lora_A and lora_B only")
        if _TOWER.search(f"{module}."):
            yield engine.refused(module, "a part outside the language model", "it adapts the language model")


def _other_parts(pair: LowRankPair) -> Iterator[str]:
    if pair.magnitude is not None:
        yield "DoRA's magnitudes (use_dora)"
    if pair.bias is not None:
        yield "a bias of lora_B (lora_bias)"


def _of_peft(
    engine: ServingEngine, adapter: Adapter, changes: AdapterChanges, model_type: str
) -> Iterator[Problem]:
    """PEFT applies everything that it saves, except to experts."""
    if not changes.experts:
        return
    for module, pair in adapter.pairs.items():
        if ".experts" in module:
            for what in _other_parts(pair):
                yield engine.refused(module, what, "pairs of stacked experts have lora_A and lora_B only")


def resized(engine: ServingEngine, adapter: Adapter, weights: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Problems of tables that were resized before the training."""
    for name, tensor in adapter.base.items():
        if name in weights and weights[name].shape != tensor.shape:
            yield engine.refused(
                name,
                f"{list(tensor.shape)} in the adapter, {list(weights[name].shape)} in the base",
                "the vocabulary is that of the base",
            )


def strengths(engine: ServingEngine, each: Mapping[str, ScaledPair]) -> Iterator[Problem]:
    """Problems of modules whose strength differs from the first's, for an engine with a single one."""
    first = next(iter(each.values())).scale if each else 0
    for module, change in each.items():
        if change.scale != first and not engine.uneven:
            yield engine.refused(
                module,
                f"alpha/r {change.scale:g}",
                f"one alpha/r for all modules, which is {first:g} in the first",
            )


def completed(
    engine: ServingEngine, linears: Mapping[str, ScaledPair], weights: Mapping[str, Tensor]
) -> dict[str, ScaledPair]:
    """The changes, with none for linears that the engine fuses with others that have one."""
    result = dict(linears)
    for module, change in linears.items():
        parent, _, name = module.rpartition(".")
        others = next((group for group in engine.fused if name in group), ())
        for other in (f"{parent}.{each}" for each in others):
            weight = weights.get(f"{other}.weight")
            if weight is not None and other not in result:
                result[other] = change.zero_change(weight.shape[0], weight.shape[1])
    return result


ENGINES: Mapping[str, ServingEngine] = {
    engine.name: engine
    for engine in (
        ServingEngine(VLLM, "vLLM", _STACKED_BY_VLLM.__contains__, _of_vllm),
        ServingEngine(
            SGLANG,
            "SGLang",
            lambda model_type: False,
            _of_sglang,
            uneven=False,
            fused=_SGLANG_FUSED,
            targets={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        ),
        ServingEngine(PEFT, "PEFT", lambda model_type: True, _of_peft),
    )
}
"""What adapters are written for, by the names that users type."""


def patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """The values that differ from the usual one, by expressions for the names of modules, as few as possible."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(_layer_pattern(name), {})[name] = value
    shortest: dict[str, Any] = {}
    for pattern, members in groups.items():
        if len({*members.values()}) == 1:
            shortest[pattern] = next(iter(members.values()))
        else:
            shortest |= {f"^{re.escape(name)}": value for name, value in members.items()}
    return {pattern: value for pattern, value in shortest.items() if value != usual}


def _layer_pattern(name: str) -> str:
    """An expression for a module in all layers and experts."""
    return "^" + re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(name))
