"""The shared parts of the makers of ms-swift's and Megatron-Bridge's checkpoints: a run, and its base model."""

from __future__ import annotations

import importlib
import json
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24}

ATTENTION_STATE = re.compile(r"(language_model\.)?mtp\..*\.core_attention\._extra_state.*")


@dataclass(frozen=True)
class Run:
    """A model with its own sizes, a layout, and options of the framework."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    ep: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def make_base(run: Run, folder: Path) -> Path:
    """The Hugging Face folder that a run starts from, in the spelling of transformers 4 and the Hub."""
    from tests.genuine.huggingface import make_model

    make_model(run.model_type, folder, dtype="bfloat16", **{**SMALL, **run.sizes})
    as_transformers_4_spells(folder)
    return folder


def as_transformers_4_spells(folder: Path) -> None:
    """Add the older spellings to what transformers 5 saved: those of most of the Hub."""
    from reshard.families.rope import both_spellings
    from reshard.folders.companions import portable_tokenizer_config

    def older(config: dict[str, Any]) -> dict[str, Any]:
        rope = both_spellings(config) if "rope_parameters" in config else {}
        return {**config, **rope, "torch_dtype": "bfloat16"}

    for name, spelled in (("config.json", older), ("tokenizer_config.json", portable_tokenizer_config)):
        file = folder / name
        file.write_text(json.dumps(spelled(json.loads(file.read_text())), indent=2))


def failure_of(out: str | Path) -> Path:
    """The file in which a job says why it did not write `out`."""
    return Path(f"{out}.failed")


def run_jobs(run: Callable[..., None], words: Sequence[str]) -> int:
    """Do the jobs that `--` separates, `COMMAND BASE OUT …` each. Returns how many failed: the others are done."""
    failed = 0
    for separator, job in groupby(words, lambda word: word == "--"):
        if separator:
            continue
        command, base, out, *rest = job
        try:
            run(command, base, out, *rest)
        except Exception:
            failure_of(out).write_text(traceback.format_exc())
            traceback.print_exc()
            failed += 1
    return failed


def load_all_keys(apart: tuple[str, ...] = ()) -> None:
    """Make megatron-core's loading raise for keys that the model or the checkpoint lacks.

    The modules `apart` may be missing from the model. Only megatron-core before 0.19 has the state of attention in MTP
    layers.
    """
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    load = checkpointing.load

    def load_all(*given: Any, **options: Any) -> Any:
        state, left, absent = load(*given, **{**options, "strict": "return_all"})
        left = [name for name in left if not name.startswith(apart) and not ATTENTION_STATE.fullmatch(name)]
        assert not left and not absent, f"the model lacks {left}, the checkpoint lacks {absent}"
        return state

    checkpointing.load = load_all
