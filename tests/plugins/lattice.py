"""The format of a fictitious tool, with all that a reader of ranks needs: CONTRIBUTING.md says to begin with a copy.

lattice.json                                {"world": 2, "config": the keys of a config.json}
rank-00.safetensors, rank-01.safetensors    a Llama under other names; ranks have parts of rows or columns
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from reshard.containers.safetensors import read_tensors
from reshard.families.dialect import HUB
from reshard.families.renaming import begun, inner
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.folders.json_objects import read_object
from reshard.formats import apply_renamings
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import Format
from reshard.formats.sharding import Split
from reshard.formats.tables.rank_files import JoinedRanks, files_of_ranks
from reshard.formats.tables.unknown_tensors import refuse_misfits
from reshard.transfer.source_files import Sources

NAME, SETTINGS, LAYERS = "lattice", "lattice.json", "net."
RANK_FILE = re.compile(r"rank-(\d{1,5})\.safetensors")
ENDS = {"model.embed_tokens.weight": "net.emb", "model.norm.weight": "net.norm", "lm_head.weight": "net.head"}
PARTS = {
    **{f"self_attn.{each}_proj.weight": f"attn.{each}" for each in "qkvo"},
    **{f"mlp.{each}_proj.weight": f"mlp.{each}" for each in ("gate", "up", "down")},
    "input_layernorm.weight": "norm1",
    "post_attention_layernorm.weight": "norm2",
}
RULES = (*begun(("model.layers.", LAYERS)), *inner(PARTS, LAYERS), *begun(*ENDS.items()))
"""Applied in this order to write, and in the opposite one to read: `net.emb` must be tried before `net.`."""
BY_ROWS = re.compile(r"net\.(\d+\.(attn\.[qkv]|mlp\.(gate|up))|emb|head)")
BY_COLUMNS = re.compile(r"net\.\d+\.(attn\.o|mlp\.down)")


def detect(path: Path) -> bool:
    """Whether a folder has the settings."""
    return (path / SETTINGS).is_file()


def split_of(name: str) -> Split | None:
    """How ranks cut a tensor; None if each has all of it."""
    if BY_ROWS.fullmatch(name):
        return Split(0)
    return Split(1) if BY_COLUMNS.fullmatch(name) else None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError for those that are missing or do not fit."""
    iterations.refuse(path, iteration, "a checkpoint of Lattice")
    settings = read_object(path / SETTINGS, sources)
    config = settings["config"]
    files = files_of_ranks(path, RANK_FILE, settings["world"])
    joined = JoinedRanks([read_tensors(file, sources) for file in files], split_of)
    own = joined.tensors()
    hub = apply_renamings.on_hub(own, RULES, config)
    checkpoint = Checkpoint(
        path=path,
        format=NAME,
        dialect=HUB,
        tensors=own,
        description=ModelDescription(path, config=config),
        replicas=joined.replicas,
        problems=joined.problems,
    )
    layers = range(config["num_hidden_layers"])
    known = {*ENDS.values(), *(f"{LAYERS}{layer}.{part}" for layer in layers for part in PARTS.values())}
    optional = {"net.head"} if config.get("tie_word_embeddings") else set()
    refuse_misfits(checkpoint, known - optional, own.keys() - known, SETTINGS)
    return replace(checkpoint, tensors=hub)


FORMAT = Format(
    NAME,
    "Lattice's checkpoints, a file for each rank (lattice.json and rank-*.safetensors)",
    detect,
    open_checkpoint,
    instead="huggingface",  # it is read-only: without a `target`
    files=(SETTINGS,),
)
