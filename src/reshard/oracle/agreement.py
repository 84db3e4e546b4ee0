"""`verify --logits`: the same tokens through both models, in the frameworks that the checkpoints are made for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.base.errors import Problem, ReshardError
from reshard.base.missing_packages import remedy
from reshard.commands.verification import Side
from reshard.families.family import ENGINE_TITLES, MCORE
from reshard.formats.options import HYBRID
from reshard.model.vocabulary import embedding_rows

THRESHOLD = 1e-5
"""Largest difference relative to the largest logit. Both sides compute in float32, for weights of any dtype."""

BATCH, LENGTH = 2, 32


def compare_logits(first: Side, second: Side) -> dict[str, Any]:
    """Run random tokens (seeded, [2, 32]) through both and compare the logits of the real vocabulary.

    Raises ReshardError if a required framework is not installed, or cannot load a side strictly.
    """
    for side in (first, second):
        _require_family(side)
    _require_packages(first, second)
    vocab = min(_vocabulary(side) for side in (first, second))
    tokens = np.random.default_rng(0).integers(0, vocab, (BATCH, LENGTH))
    a, b = _logits(first, tokens)[..., :vocab], _logits(second, tokens)[..., :vocab]
    difference, scale = float(np.abs(a - b).max()), float(np.abs(a).max())
    relative = difference / scale if scale else difference
    return {
        "equal": bool(relative <= THRESHOLD),  # NaN is not equal
        "difference": difference,
        "scale": scale,
        "relative": relative,
        "threshold": THRESHOLD,
        "tokens": tokens.size,
        "a": _oracle(first),
        "b": _oracle(second),
    }


def _vocabulary(side: Side) -> int:
    return side.model.dims.vocab if side.model else embedding_rows(side.checkpoint)


def _oracle(side: Side) -> str:
    return "transformers" if side.checkpoint.has_hub_names else "megatron-core"


def _logits(side: Side, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    checkpoint = side.checkpoint
    if checkpoint.has_hub_names:
        from reshard.oracle.transformers import transformers_logits

        return transformers_logits(checkpoint.description.folder, tokens)
    from reshard.oracle.megatron.logits import megatron_logits

    args = (side.model.args if side.model else checkpoint.description.args) or {}
    # Only Megatron-LM stores it; Megatron-Bridge and mcore-bridge derive it.
    args = {**args, "padded_vocab_size": embedding_rows(checkpoint)}
    # torch_dist loads on one rank whatever its layout was; legacy files only in their own layout.
    layout = checkpoint.layout.complete() if checkpoint.format == "megatron-legacy" else None
    return megatron_logits(checkpoint.path, tokens, args=args, layout=layout).logits


MODULE_OF_ORACLE = {"transformers": "transformers", "megatron-core": "megatron.core"}
"""The module that computes, by the package that has it."""


def _require_family(side: Side) -> None:
    """Raise ReshardError if megatron-core would have to compute a family that it does not have."""
    if side.checkpoint.has_hub_names or side.model is None:
        return
    if side.checkpoint.variant == HYBRID:
        raise ReshardError(
            "logits-of-hybrid-model",
            "HybridModel consists of Transformer Engine's modules, which need a GPU",
            file=str(side.checkpoint.path),
            remedy="convert it with --to megatron --megatron-model gpt, and compare the output, with the same weights",
        )
    engine = side.model.family.engine_for(side.checkpoint.dialect.engine or MCORE)
    if engine != MCORE:
        raise ReshardError(
            "logits-megatron-lacks-family",
            f"megatron-core's GPTModel does not compute these weights of family {side.model.family.name}",
            rule=f"the engine of this family is {ENGINE_TITLES[engine]}",
            remedy="leave out --logits: the weights are compared all the same",
        )


def _require_packages(*sides: Side) -> None:
    """Raise ReshardError for every package that a side needs and that is not installed."""
    needed = {name: MODULE_OF_ORACLE[name] for name in map(_oracle, sides)}
    missing = {name: module for name, module in needed.items() if not _is_installed(module)}
    if missing:
        raise ReshardError(
            Problem(
                "logits-package-not-installed",
                f"{name} is not installed; --logits computes with it",
                remedy=remedy(ImportError(name=module)),
            )
            for name, module in missing.items()
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
