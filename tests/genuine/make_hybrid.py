"""Checkpoints of megatron-core's HybridModel, and what it does with those that reshard wrote.

It needs megatron-core 0.19, in the environment `megatron-bridge-0.6` of tests/environments.py:

    python -m tests.genuine.make_hybrid make NAME OUT           train for two steps, save, and compute logits
    python -m tests.genuine.make_hybrid weights NAME OUT        the same without the optimizer, as in tests/data
    python -m tests.genuine.make_hybrid resume NAME FOLDER OUT  load a run strictly, and train for two more steps
    python -m tests.genuine.make_hybrid logits FOLDER …         load iterations strictly, and compute logits
    python -m tests.genuine.make_hybrid interop PATTERN FOLDER  load one of GPTModel into a HybridModel

NAME is one of RUNS; with `gpt-` in front of it, the model is the GPTModel with the same layers. With a name of MUON
before that, Muon trains it, which needs the environment `muon`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.layout import Layout
from tests.genuine import fake_te
from tests.genuine.megatron import DEEPSEEK_V3, GLM4_MOE, QWEN2, QWEN3, QWEN3_MOE, tokens

ENVIRONMENT = "megatron-bridge-0.6"
TOKENS = tokens()[:2, :12]
"""What logits are computed of."""


@dataclass(frozen=True)
class HybridRun:
    """The arguments of a GPTModel, the pattern of the HybridModel that computes the same, and a layout."""

    args: dict[str, Any]
    pattern: str
    layout: Layout

    @property
    def hybrid_args(self) -> dict[str, Any]:
        """The arguments of the HybridModel."""
        layers = len(self.pattern.partition("/")[0].replace("|", ""))
        named = {"num_layers": layers, "hybrid_layer_pattern": self.pattern, "is_hybrid_model": True}
        return {**self.args, **named, "moe_layer_freq": 1}


GROUPED = {"moe_grouped_gemm": True}
RUNS = {
    "dense": HybridRun(QWEN3, "*-*-*-*-", Layout(tp=2)),
    "tied": HybridRun(
        {**QWEN2, "untie_embeddings_and_output_weights": False}, "*-*-|*-*-", Layout(tp=2, pp=2)
    ),
    "uneven": HybridRun(QWEN3, "*|-*-*-*-", Layout(pp=2)),
    "chunks": HybridRun(QWEN3, "*-|*-|*-|*-", Layout(pp=2, vpp=2)),
    "experts": HybridRun({**QWEN3_MOE, **GROUPED}, "*E*E|*E*E", Layout(tp=2, pp=2, ep=2, etp=1)),
    "mixed": HybridRun({**GLM4_MOE, **GROUPED, "mtp_num_layers": None}, "*-*E*E*E", Layout(ep=2)),
    "predicting": HybridRun({**GLM4_MOE, **GROUPED}, "*-*E*E*E/*E", Layout(ep=2)),
    "small": HybridRun(
        {**QWEN2, "num_layers": 1, "hidden_size": 16, "untie_embeddings_and_output_weights": False},
        "*-",
        Layout(tp=2),
    ),
    "latent": HybridRun({**DEEPSEEK_V3, **GROUPED}, "+-+E+E+E/+E", Layout(ep=2)),
}

MUON = {
    "muon": (False, "fully_reshardable"),
    "layers": (True, "fully_reshardable"),
    "buffers": (True, "dp_reshardable"),
}
"""How Muon trains: whether each data-parallel rank has whole matrices, and what becomes of Adam's states then."""


def run_of(name: str) -> tuple[dict[str, Any], Layout]:
    """The arguments and the layout of a run, or of the GPTModel with the same layers."""
    run = RUNS[name.removeprefix("gpt-")]
    return (
        (run.args, replace(run.layout, stages=()))
        if name.startswith("gpt-")
        else (run.hybrid_args, run.layout)
    )


def make(name: str, out: Path, *, initial: Path | None = None, optimizer: bool = True) -> list[float]:
    """Train for two steps and save, or continue a run; the losses."""
    from tests.genuine.mcore.checkpoint_io import SaveOptions
    from tests.genuine.train_megatron import train_and_save

    trained_by, _, model = name.partition("-") if name.startswith(tuple(MUON)) else ("", "", name)
    args, layout = run_of(model)
    distributed, sharding = MUON.get(trained_by, (True, "fully_reshardable"))
    run = train_and_save(
        args,
        out,
        tokens(),
        checkpoint=initial,
        resume=initial is not None,
        layout=layout,
        lr=1e-2,
        spec="te",
        distributed_optimizer=distributed,
        optimizer="muon" if trained_by else "adam",
        iteration=4 if initial else 2,
        save=SaveOptions(optimizer=optimizer, optimizer_sharding=sharding),
    )
    if not initial:
        logits([run.folder])
    return list(run.losses)


def logits(folders: Iterable[Path]) -> None:
    """Load iterations strictly, each in one rank, and save the logits beside each; or why they cannot be loaded."""
    from megatron.core import dist_checkpointing

    from tests.genuine.mcore.models import megatron_logits

    for folder in folders:
        args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
        if pattern := getattr(args, "hybrid_layer_pattern", ""):
            args.hybrid_layer_pattern = pattern.replace("|", "")  # one rank has all stages
        try:
            result = megatron_logits(folder, TOKENS, args=args, spec="te")
        except Exception as error:  # the next one may load
            (folder / "logits.txt").write_text(str(error))
        else:
            np.savez(folder / "logits.npz", *result.mtp, result.logits)


def main(command: str, *words: str) -> None:
    """Run one command."""
    match command:
        case "make":
            print(json.dumps(make(words[0], Path(words[1]))))
        case "weights":
            make(words[0], Path(words[1]), optimizer=False)
        case "resume":
            print(json.dumps(make(words[0], Path(words[2]), initial=Path(words[1]))))
        case "logits":
            logits(map(Path, words))
        case "interop":
            from tests.genuine.mcore import hybrid_model

            with hybrid_model.loading_gpt(words[0]):
                logits([Path(words[1])])


if __name__ == "__main__":
    fake_te.install()
    main(*sys.argv[1:])
