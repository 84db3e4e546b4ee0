"""An adapter: low-rank pairs by module, fully trained weights, and settings such as alpha."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.adapters.adapter_settings import AdapterSettings, find_settings, rank_problems, type_problems
from reshard.adapters.peft_names import MAGNITUDE, PairPart, WholeWeight, parse
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.formats.checkpoint import Checkpoint


class LowRankPair(NamedTuple):
    """The low-rank change of one module: `b` [out, r] times `a` [r, in]; of an embedding, `a` is [r, rows].

    `magnitude` is DoRA's, [out]. `bias` is that of B, [out], which `lora_bias` trains.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None
    bias: Tensor | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All its tensors, with the names that PEFT appends to the module's."""
        middle, end = ("embedding_", "") if self.embedding else ("", ".weight")
        yield f"lora_{middle}A{end}", self.a
        yield f"lora_{middle}B{end}", self.b
        if self.bias:
            yield "lora_B.bias", self.bias
        if self.magnitude:
            yield MAGNITUDE, self.magnitude


@dataclass
class Adapter:
    """`pairs` by module (`model.layers.0.self_attn.q_proj`), weights by name (`lm_head.weight`).

    `whole` are fully trained weights (`modules_to_save`, biases), `base` weights of the base model in the same
    checkpoint. `others` are the bytes of other adapters in it.
    """

    pairs: dict[str, LowRankPair]
    whole: dict[str, Tensor]
    base: dict[str, Tensor]
    settings: AdapterSettings = field(default_factory=AdapterSettings)
    others: int = 0

    def renamed(self, name: Callable[[str], str]) -> Adapter:
        """The same with each name replaced by `name(...)`, which changes only its beginning."""

        def module(path: str) -> str:
            return name(f"{path}.").removesuffix(".")

        return Adapter(
            {module(path): pair for path, pair in self.pairs.items()},
            {name(path): tensor for path, tensor in self.whole.items()},
            {name(path): tensor for path, tensor in self.base.items()},
            self.settings,
            self.others,
        )

    @property
    def ranks(self) -> list[int]:
        """All ranks of its pairs, without repetitions."""
        return sorted({pair.rank for pair in self.pairs.values()})

    @property
    def has_base(self) -> bool:
        """Whether the checkpoint has the base's weights: those of every changed module, and others."""
        names = self.base.keys() | self.whole.keys()
        return all(f"{module}.weight" in names for module in self.pairs) and len(names) > len(self.pairs)


def read_adapter(checkpoint: Checkpoint, name: str | None = None, alpha: float | None = None) -> Adapter:
    """The adapter in a checkpoint, called `name` if there are several; `alpha` overrides any file.

    Raises ReshardError for a tensor that is empty, that has no partner, or whose shape does not fit its partner's,
    listing all; and for adapters of another kind than LoRA.
    """
    settings = find_settings(checkpoint, alpha)
    raise_all(type_problems(settings))
    parsed = {key: parse(key) for key in checkpoint.tensors}
    if grouped := [
        _grouped(key, tensor) for key, tensor in checkpoint.tensors.items() if _is_grouped(key, tensor)
    ]:
        raise ReshardError(one_for_all(grouped, checkpoint.tensors, str(checkpoint.path)))
    chosen = _chosen_name(parsed.values(), name, str(checkpoint.path))
    parts: dict[str, dict[tuple[str, str], Tensor]] = defaultdict(dict)
    for key, part in parsed.items():
        if isinstance(part, PairPart) and part.adapter == chosen:
            parts[part.module][part.kind, part.leaf] = checkpoint.tensors[key]
    problems = [
        problem
        for module, tensors in parts.items()
        for problem in _pair_problems(module, tensors, str(checkpoint.path))
    ]
    if problems:
        names = [str(problem.tensor) for problem in problems]
        raise ReshardError(one_for_all(problems, names, str(checkpoint.path)))
    pairs = {module: _pair(tensors) for module, tensors in parts.items()}
    if not settings.parameters:  # for stacked experts, the shape does not give the rank
        problems = list(rank_problems(settings, ((m, pair.rank) for m, pair in pairs.items())))
    raise_all(one_for_all(problems, pairs, settings.source))
    others = sum(
        checkpoint.tensors[key].nbytes for key, part in parsed.items() if _is_of_another(part, chosen)
    )
    return Adapter(pairs, *_whole_weights(checkpoint, parsed, chosen, settings), settings, others)


def _is_grouped(key: str, tensor: Tensor) -> bool:
    """Whether a tensor has a factor of each expert, as PEFT never has."""
    return bool(_GROUPED.search(key)) or ("lora_" in key and len(tensor.shape) == 3)


def _grouped(key: str, tensor: Tensor) -> Problem:
    return Problem(
        "adapter-experts-grouped",
        "the pairs of experts are grouped in a layout that PEFT does not have",
        tensor=key,
        file=tensor.file,
        rule="each expert has a pair of its own, or all share one pair of two dimensions",
        found=str(list(tensor.shape)),
        remedy="export it again with the tool that trained it: build_lora_adapter of tinker_cookbook.weights, "
        "expand_shared_outer=True of Megatron-Bridge, or a newer release of NeMo AutoModel",
    )


def _is_of_another(part: PairPart | WholeWeight, chosen: str) -> bool:
    return (isinstance(part, PairPart) or part.trained) and part.adapter != chosen


def _whole_weights(
    checkpoint: Checkpoint,
    parsed: Mapping[str, PairPart | WholeWeight],
    chosen: str,
    settings: AdapterSettings,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that the adapter trained fully, and those of the base."""
    whole: dict[str, Tensor] = {}
    base: dict[str, Tensor] = {}
    for key, part in parsed.items():
        if isinstance(part, PairPart) or _is_of_another(part, chosen):
            continue
        # save_pretrained, which omits the adapter's name, writes only trained weights
        trained = part.trained or not (chosen or ".base_layer." in key or part.replaced)
        (whole if trained else base)[part.name] = checkpoint.tensors[key]
    biases = _trained_biases(settings, base)
    return whole | biases, {name: tensor for name, tensor in base.items() if name not in biases}


def _trained_biases(settings: AdapterSettings, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's biases, if the config says that they were trained."""
    if settings.config.get("bias", "none") == "none":
        return {}
    return {name: tensor for name, tensor in base.items() if name.endswith(".bias")}


def _chosen_name(parts: Iterable[PairPart | WholeWeight], name: str | None, file: str) -> str:
    """The name of the adapter to use, as in the names of tensors; "" if they have none."""
    names = sorted({part.adapter for part in parts if isinstance(part, PairPart)})
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    if names == [""]:  # the file has no name that could differ
        return ""
    raise ReshardError(
        "adapter-name-unknown" if name else "adapter-ambiguous",
        "there is no adapter of this name" if name else "the checkpoint contains several adapters",
        file=file,
        expected=", ".join(names),
        found=f"--adapter {name}" if name else f"{len(names)} adapters",
        remedy="choose one of them: --adapter NAME",
    )


_GROUPED = re.compile(r"\.lora_(?:gate_and_up|down)_[AB]$")
"""NeMo AutoModel's names for the factors [E, in, r] and [E, r, out] of all experts."""
_KINDS = (("lora_A", "lora_B", "weight"), ("lora_embedding_A", "lora_embedding_B", ""))


def _pair(tensors: Mapping[tuple[str, str], Tensor]) -> LowRankPair:
    for a, b, leaf in _KINDS:
        if (a, leaf) in tensors:
            magnitude = tensors.get((MAGNITUDE, "")) or tensors.get((MAGNITUDE, "weight"))
            bias = tensors.get((b, "bias"))
            return LowRankPair(tensors[a, leaf], tensors[b, leaf], magnitude, bias, embedding=leaf == "")
    raise AssertionError("its problems were looked for first")


def _pair_problems(module: str, tensors: Mapping[tuple[str, str], Tensor], file: str) -> Iterator[Problem]:
    for (kind, leaf), tensor in tensors.items():
        if (tensor.view.numel == 0 or len(tensor.shape) != 2) and kind != MAGNITUDE and leaf != "bias":
            yield Problem(
                "adapter-tensor-empty",
                "a tensor of the adapter is empty or flattened",
                tensor=f"{module}.{kind}",
                file=tensor.file if tensor.view.pieces else file,
                rule="lora_A is [r, in] and lora_B is [out, r]",
                found=str(list(tensor.shape)),
                remedy="it was saved while DeepSpeed ZeRO-3 or FSDP had its shards on other ranks: gather "
                "them and save it again, or convert the sharded checkpoint of the same step",
            )
            return
    for a, b, leaf in _KINDS:
        if ((a, leaf) in tensors) != ((b, leaf) in tensors):
            present, missing = (a, b) if (a, leaf) in tensors else (b, a)
            yield _unpaired_problem(f"{module}.{present}", f"{module}.{missing}", file)
        elif (a, leaf) in tensors and tensors[a, leaf].shape[0] != tensors[b, leaf].shape[1]:
            yield Problem(
                "adapter-pair-ranks-differ",
                "lora_A and lora_B have different ranks",
                tensor=module,
                file=file,
                expected=f"{a} [r, …] and {b} [out, r]",
                found=f"{list(tensors[a, leaf].shape)} and {list(tensors[b, leaf].shape)}",
                remedy="the files are of different adapters: copy all of one again",
            )
    if not any((a, leaf) in tensors or (b, leaf) in tensors for a, b, leaf in _KINDS):
        yield _unpaired_problem(f"{module}.{MAGNITUDE}", f"{module}.lora_A and lora_B", file)


def _unpaired_problem(present: str, missing: str, file: str) -> Problem:
    return Problem(
        "adapter-pair-incomplete",
        "a tensor of the adapter has no partner",
        tensor=present,
        file=file,
        rule="each module has lora_A and lora_B",
        expected=missing,
        remedy="the adapter is incomplete: copy or save it again",
    )
