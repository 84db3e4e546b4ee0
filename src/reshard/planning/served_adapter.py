"""An adapter in the layout of what will apply it: vLLM, SGLang or PEFT (`--for`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard import adapters
from reshard.adapters.adapter import Adapter, LowRankPair
from reshard.adapters.adapter_changes import (
    DOWN,
    GATE_UP,
    AdapterChanges,
    ExpertChanges,
    ScaledPair,
    changes,
    experts_apart,
    inputs_first,
    stacked,
)
from reshard.adapters.expert_layout import ORDER, WRITTEN_LAYOUT
from reshard.adapters.peft_config import target_modules
from reshard.adapters.peft_names import PREFIX
from reshard.adapters.serving_engines import (
    ENGINES,
    PEFT,
    ServingEngine,
    completed,
    patterns,
    resized,
    strengths,
)
from reshard.algebra.tensors import Tensor
from reshard.base.errors import raise_all
from reshard.base.merged_problems import one_for_all
from reshard.families import Family, declared, live_names
from reshard.families.transformers_5 import MemoryNames
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Request
from reshard.model.find_config import config_of
from reshard.model.memory_names import live_tensors
from reshard.planning.adapter_tensors import BASE_WEIGHTS, OTHER_ADAPTERS, same_bytes
from reshard.planning.merged_source import adapter_base
from reshard.planning.target_tensors import OutputTypes
from reshard.stores.hub import model_name
from reshard.transfer.plan import Planned

INNER = ".base_layer"
"""What PEFT appends to the experts' module for the first of two stacks."""

ONE_PAIR = "one alpha/r for gate, up and down of all experts of a layer"


@dataclass(frozen=True)
class _AdaptedModel:
    """The model that an adapter belongs to: weights under the names of a plain language model."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    family: Family | None
    notes: Sequence[str]

    def hub(self, name: str) -> str:
        """The Hub's name of a module."""
        return self._module(self.family.hub_name, name) if self.family else name

    def live(self, name: str) -> str:
        """The name in memory of a module that the Hub calls `name`."""
        live = live_names(self.config, self.family.name if self.family else None)
        return self._module(live.to_live, name) if live else name

    @staticmethod
    def _module(rename: Any, name: str) -> str:
        return str(rename(f"{name}.weight")).removesuffix(".weight")

    def stacks(self) -> dict[str, bool]:
        """The modules of experts that are stacks in memory, by their names there, and whether PEFT turns their pairs.

        PEFT takes every stack for [E, outputs, inputs] unless its module has `is_transposed`.
        """
        live: MemoryNames | None = live_names(self.config, self.family.name if self.family else None)
        hub = (
            Planned.of(self.family.hub_name(name) if self.family else name, t)
            for name, t in self.weights.items()
        )
        shapes = {each.name: each.shape for each in live_tensors(hub, live)}
        is_transposed = bool(self.family and self.family.turned_pairs)
        turned = {}
        for name, shape in shapes.items():
            down = shapes.get(name.replace("gate_up_proj", "down_proj"))
            if name.endswith(".experts.gate_up_proj") and down:
                turned[name.removesuffix(".gate_up_proj")] = inputs_first(shape, down) and not is_transposed
        return turned


def served(checkpoint: Checkpoint, request: Request) -> tuple[Request, dict[str, int], list[str]]:
    """The request with tensors and settings, the bytes left out by rule, and notes.

    Raises ReshardError naming everything that the engine does not apply.
    """
    options = request.options
    engine = ENGINES[str(options.adapter_for)]
    adapter = adapters.read_adapter(checkpoint, options.adapter, options.lora_alpha)
    base = _base(checkpoint, adapter, request)
    if base.family:
        adapter = adapter.renamed(base.family.plain_name)
    adapted = changes(adapter, base.weights, turned=bool(base.family and base.family.turned_pairs))
    problems = [*adapted.problems, *engine.problems(engine, adapter, adapted, _type(base))]
    problems += resized(engine, adapter, base.weights) if engine.name != PEFT else []
    raise_all(one_for_all(problems, [*adapter.pairs, *adapter.whole], str(checkpoint.path)))
    written = _ServedChanges(engine, base, completed(engine, adapted.linears, base.weights), adapted)
    written.check()
    types = OutputTypes(options.dtype)
    others = _other_tensors(adapter, base) if engine.name == PEFT else []
    tensors = [
        Planned.of(name, tensor, types.of(name, tensor.dtype))
        for name, tensor in [*written.tensors(), *others]
    ]
    dropped = {OTHER_ADAPTERS: adapter.others, BASE_WEIGHTS: 0}
    if not others:
        dropped[BASE_WEIGHTS] = sum(tensor.nbytes for tensor in adapter.base.values())
    settings = written.settings(
        adapter, model_name(options.base_path) if options.base_path else adapter.settings.base
    )
    notes = [*base.notes, *_how(engine, written)]
    return replace(request, tensors=tensors, adapter=settings), dropped, notes


def _base(checkpoint: Checkpoint, adapter: Adapter, request: Request) -> _AdaptedModel:
    options = request.options
    rule = "the base tells how an engine names the modules, and which of them are experts"
    base = adapter_base(checkpoint, adapter, options, rule)
    weights = base.weights or adapter.base
    config = base.config or config_of(base.checkpoint or checkpoint) or {}
    family = declared(options.family or config.get("model_type"))
    if family:
        weights = {family.plain_name(name): tensor for name, tensor in weights.items()}
    return _AdaptedModel(weights, config, family, base.notes)


def _type(base: _AdaptedModel) -> str:
    return str(base.config.get("model_type"))


def _other_tensors(adapter: Adapter, base: _AdaptedModel) -> Iterator[tuple[str, Tensor]]:
    """What PEFT saves besides pairs: trained weights, and tables of the base."""
    for name, tensor in adapter.whole.items():
        yield f"{PREFIX}{base.live(base.hub(name.removesuffix('.weight')))}.weight", tensor
    for name, tensor in adapter.base.items():
        module, _, leaf = name.rpartition(".")
        wrapped = "original_module" if name in adapter.whole else "base_layer"
        yield f"{PREFIX}{base.live(base.hub(module))}.{wrapped}.{leaf}", tensor


class _ServedChanges:
    """The changes by the modules that the engine knows, and the stacks by PEFT's names for their parameters."""

    def __init__(
        self,
        engine: ServingEngine,
        base: _AdaptedModel,
        linears: Mapping[str, ScaledPair],
        changes: AdapterChanges,
    ) -> None:
        in_memory = engine.name == PEFT
        self._engine = engine
        self.modules: dict[str, ScaledPair] = {}
        self.parameters: dict[str, str] = {}
        self.uneven: list[str] = []
        stacks = base.stacks() if in_memory and changes.experts else {}
        for module, change in linears.items():
            hub = base.hub(module)
            self.modules[base.live(hub) if in_memory else hub] = change
        for experts in changes.experts:
            own = replace(experts, module=base.hub(f"{experts.module}.0.x").removesuffix(".0.x"))
            live = base.live(f"{own.module}.0.x").removesuffix(".0.x")
            if (live in stacks) if in_memory else engine.stacks(_type(base)):
                self._stack(own, live if in_memory else own.module, turned=stacks.get(live, False))
            else:
                self.modules |= dict(experts_apart(own))

    def _stack(self, experts: ExpertChanges, module: str, *, turned: bool) -> None:
        try:
            pairs = dict(stacked(experts, same_bytes, both=self._engine.name != PEFT, turned=turned))
        except ValueError:
            self.uneven.append(experts.module)
            return
        for role, change in pairs.items():
            inner = INNER if role == GATE_UP and DOWN in pairs else ""
            self.modules[module + inner] = change
            self.parameters[module + inner] = f"{module}.{role}_proj"
        self._count = experts.count

    def rank(self, module: str) -> int:
        """The rank that the settings have for a module: for stacks, that of one expert."""
        rank = self.modules[module].pair.rank
        return rank // self._count if module in self.parameters else rank

    def check(self) -> None:
        """Raise ReshardError for strengths that the engine does not have, naming all modules."""
        problems = [self._engine.refused(each, "different ones", ONE_PAIR) for each in self.uneven]
        problems += strengths(self._engine, self.modules)
        raise_all(one_for_all(problems, self.modules, "the adapter"))
        if not self._engine.uneven:
            rank = max(change.pair.rank for change in self.modules.values())
            self.modules = {module: change.padded(rank) for module, change in self.modules.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under PEFT's names."""
        for module, change in self.modules.items():
            for name, tensor in change.pair.tensors():
                yield f"{PREFIX}{module}.{name}", tensor

    def settings(self, adapter: Adapter, base: str | None) -> dict[str, Any]:
        """The adapter_config.json: that of the source for PEFT, without what no longer applies."""
        names = {self.parameters.get(module, module): module for module in self.modules}
        ranks = {name: self.rank(module) for name, module in names.items()}
        alphas = {name: _as_integer(self.modules[names[name]].scale * rank) for name, rank in ranks.items()}
        (rank, alpha) = Counter(zip(ranks.values(), alphas.values(), strict=True)).most_common(1)[0][0]
        own = adapter.settings.config if self._engine.name == PEFT and adapter.settings.written else {}
        pairs = [change.pair for change in self.modules.values()]
        settings = {
            "peft_type": "LORA",
            "task_type": adapter.settings.config.get("task_type") or "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": self._targets(adapter),
            "rank_pattern": patterns(ranks, rank),
            "alpha_pattern": patterns(alphas, alpha),
            "use_rslora": False,
            "use_dora": any(pair.magnitude is not None for pair in pairs),
            "lora_bias": any(pair.bias is not None for pair in pairs),
        }
        rest = {"bias": "none", "modules_to_save": None, "fan_in_fan_out": False, "init_lora_weights": True}
        if self.parameters or own.get("target_parameters"):
            own = {key: value for key, value in own.items() if key != ORDER}
            ends = (".".join(name.split(".")[-3:]) for name in self.parameters.values())
            settings |= {"target_parameters": list(dict.fromkeys(ends)), **WRITTEN_LAYOUT}
        return {**rest, **own, **settings}

    def _targets(self, adapter: Adapter) -> list[str]:
        linears = {m: c.pair for m, c in self.modules.items() if m not in self.parameters}
        experts = {m for m in linears if ".experts." in m}
        others: dict[str, LowRankPair] = {m: pair for m, pair in linears.items() if m not in experts}
        leaves = {each.rpartition(".")[2] for each in experts}
        targets = {self._engine.targets.get(leaf, leaf) for leaf in leaves}
        if others:
            targets |= {*target_modules(replace(adapter, pairs=others))}
        return sorted(targets)


def _as_integer(alpha: float) -> float | int:
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 * abs(alpha) else alpha


def _how(engine: ServingEngine, written: _ServedChanges) -> list[str]:
    rank = max(written.rank(module) for module in written.modules)
    return [f"the adapter has the layout of {engine.title}; its rank is {rank}"]
