"""HybridModel of megatron-core, whose layers are attention or an MLP alone, in the order of `hybrid_layer_pattern`.

A model that GPTModel computes has pairs of them: `*-*E` is two layers of GPTModel, the first dense, the second with
experts. `|` ends a pipeline chunk, and `/` begins the pattern of each multi-token prediction layer. Only the numbers of
layers, the name of the last norm and the arguments differ from those of GPTModel, whose names reshard has inside.
Source: `models/hybrid` of megatron-core 0.19.2, and `MultiTokenPredictionLayer` there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.algebra.layout import Layout
from reshard.families.dims import LAYER_PATTERN, layer_pattern
from reshard.formats.megatron.mcore import MegatronPosition
from reshard.formats.options import GPT, HYBRID

STACK_SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
"""`--spec` of a HybridModel."""

HYBRID_ARGUMENTS = (LAYER_PATTERN, "hybrid_override_pattern", "is_hybrid_model", "spec")
"""Arguments that a GPTModel does not have."""

POSITIONS = ("rope", "yarn", "none", "learned_absolute", None)
"""The position embeddings of HybridModel."""

EACH_NTH = {"window_attn_skip_freq": 0, "no_rope_freq": 1}
"""Arguments that are a list of 0 and 1 for the layers, or a number N. This is what N means for every Nth layer."""

DELTA_NET, ATTENTION, SPARSE_ATTENTION, LATENT_ATTENTION, MLP, EXPERTS = "G*D+-E"
_PAIR = r"[G*D+][-E]"
_PAIRS = re.compile(rf"({_PAIR})+(/{_PAIR})*")

_FINAL_NORM = {GPT: "decoder.final_layernorm.", HYBRID: "decoder.final_norm."}
_INNER = re.compile(r"transformer_layer\.layers\.\d+\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def is_of_pairs(args: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of a HybridModel that computes what a GPTModel does."""
    return bool(_PAIRS.fullmatch(layer_pattern(args).replace("|", "")))


def gpt_name(name: str) -> str:
    """The name in a GPTModel of a tensor of a HybridModel that has pairs of layers."""
    if name.startswith(_FINAL_NORM[HYBRID]):
        return name.replace(_FINAL_NORM[HYBRID], _FINAL_NORM[GPT], 1)
    name = _INNER.sub("transformer_layer.", name, count=1)
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) // 2}.", name, count=1)


def gpt_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the GPTModel that computes what a HybridModel with these does."""
    main, *predicted = layer_pattern(args).replace("|", "").split("/")
    mixers, mlps = main[::2], main[1::2]
    changed: dict[str, Any] = {"num_layers": len(mlps), "mtp_num_layers": len(predicted) or None}
    if EXPERTS in mlps:
        changed["moe_layer_freq"] = [int(each == EXPERTS) for each in mlps] if MLP in mlps else 1
    if DELTA_NET in mixers:
        changed["linear_attention_freq"] = [int(each == DELTA_NET) for each in mixers]
    changed |= {
        name: _shortest(name, each[::2]) for name in EACH_NTH if isinstance(each := args.get(name), list)
    }
    given = {name: value for name, value in args.items() if name not in HYBRID_ARGUMENTS}
    return {**given, **changed}


def not_computed(args: Mapping[str, Any]) -> str:
    """What a HybridModel lacks of the GPTModel with these arguments; empty if it computes the same."""
    position = args.get("position_embedding_type")
    if args.get("use_rope_scaling"):
        return "the rotary scaling of Llama 3 (--use-rope-scaling)"
    if args.get("rotary_interleaved"):
        return "interleaved rotary embeddings (--rotary-interleaved)"
    return "" if position in POSITIONS else f"--position-embedding-type {position}"


@dataclass(frozen=True)
class HybridLayers:
    """The layers of a HybridModel that computes what a GPTModel with tensors at some places does."""

    decoder: str
    """The symbols of all layers of the decoder."""
    predicted: str
    """Those of each multi-token prediction layer, after a `/` each."""

    @staticmethod
    def at(places: Iterable[MegatronPosition]) -> HybridLayers:
        """The layers with tensors at these places."""
        modules: dict[tuple[str, int], set[str]] = {}
        for place in places:
            if place.layer is not None:
                modules.setdefault((place.stack, place.layer), set()).add(place.module)
        pairs = {layer: _mixer(" ".join(each)) + _mlp(" ".join(each)) for layer, each in modules.items()}
        decoder = "".join(pairs[layer] for layer in sorted(pairs) if layer[0] == "decoder")
        return HybridLayers(
            decoder, "".join(f"/{pairs[layer]}" for layer in sorted(pairs) if layer[0] == "mtp")
        )

    def pattern(self, layout: Layout) -> str:
        """The argument: the layers of each pipeline chunk, in their order."""
        chunks = layout.chunks(len(self.decoder) // 2)
        cut = [self.decoder[2 * layers.start : 2 * layers.stop] for _, _, layers in chunks]
        return "|".join(cut) + self.predicted

    def args(self, args: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        """The arguments of the HybridModel instead of those of the GPTModel."""
        delta_nets = [int(each == DELTA_NET) for each in self.decoder]
        return {
            **args,
            "num_layers": len(self.decoder),
            "moe_layer_freq": [int(each == EXPERTS) for each in self.decoder],
            **{name: self._by_layer(name, args[name]) for name in EACH_NTH if args.get(name)},
            **({"linear_attention_freq": delta_nets} if any(delta_nets) else {}),
            "is_hybrid_model": True,
            LAYER_PATTERN: self.pattern(layout),
            "spec": list(STACK_SPEC),
        }

    def _by_layer(self, name: str, given: int | Sequence[int]) -> list[int]:
        """The value of one of `EACH_NTH` for the layers of a HybridModel."""
        each = _of_number(name, given, len(self.decoder) // 2) if isinstance(given, int) else given
        return [value for value in each for _ in range(2)]


def hybrid_layout(layout: Layout) -> Layout:
    """The layout with the layers of each stage counted as a HybridModel does."""
    return replace(layout, stages=tuple(2 * layers for layers in layout.stages))


def hybrid_place(place: MegatronPosition) -> MegatronPosition:
    """The place in a HybridModel of a tensor of a GPTModel."""
    if place.module.startswith(_FINAL_NORM[GPT]):
        return place._replace(module=place.module.replace(_FINAL_NORM[GPT], _FINAL_NORM[HYBRID], 1))
    if place.layer is None:
        return place
    inner = place.module.removeprefix("transformer_layer.")
    half = int(inner.startswith(("mlp.", "pre_mlp_layernorm.")))
    if place.stack == "decoder":
        return place._replace(layer=2 * place.layer + half)
    if inner == place.module:
        return place
    return place._replace(module=f"mtp_model_layer.layers.{half}.{inner}")


def _of_number(name: str, number: int, layers: int) -> list[int]:
    """The list that a number means as one of `EACH_NTH`."""
    nth = EACH_NTH[name]
    return [nth if layer % number == 0 else 1 - nth for layer in range(1, layers + 1)]


def _shortest(name: str, each: list[int]) -> int | list[int]:
    """The number that means a list as one of `EACH_NTH`, or the list."""
    numbers = range(1, len(each) + 1)
    return next((number for number in numbers if _of_number(name, number, len(each)) == each), each)


def _mixer(modules: str) -> str:
    """The symbol of what mixes the tokens."""
    if "self_attention.in_proj." in modules:
        return DELTA_NET
    if "core_attention.indexer." in modules:
        return SPARSE_ATTENTION
    return LATENT_ATTENTION if "linear_kv_up_proj." in modules else ATTENTION


def _mlp(modules: str) -> str:
    return EXPERTS if "mlp.experts." in modules else MLP
