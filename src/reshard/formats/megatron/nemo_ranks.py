"""NeMo 1's files of ranks, as a `.nemo` archive or its unpacked folder has them.

    model_weights.ckpt                              one rank
    mp_rank_01/model_weights.ckpt                   tensor parallelism
    tp_rank_01_pp_rank_000/model_weights.ckpt       pipeline stages, too

Each is a state dict whose names begin with `model.`: those of Megatron-Core, or, in models that NeMo's own code
computes (`mcore_gpt: false`), older ones that are translated here. Layers count from zero in each stage. Adapters are
saved so in every version. Sources: `NLPSaveRestoreConnector` in `nlp/parts/nlp_overrides.py` of NeMo 1.23 and 2.3,
`nlp/modules/common/megatron` in both, and `nlp/parts/peft_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.algebra.layout import SavedLayout
from reshard.base.errors import Problem, raise_all
from reshard.containers.torchfiles.read import read_dict
from reshard.families.dialect import MEGATRON
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import NEMO, NEMO_FILE, nemo_files
from reshard.formats.megatron.legacy import LegacyReader
from reshard.formats.megatron.mcore import is_gated
from reshard.formats.megatron.rank_files import JoiningFacts
from reshard.formats.megatron.rank_states import MegatronRank
from reshard.formats.megatron.writers import recorded_args
from reshard.transfer.source_files import Sources

_WRAPPERS = re.compile(r"(?:model\.)?(?:module\.)?")
_NAMES = (
    (r"language_model\.(embedding\.word_embeddings|output_layer)\.", r"\1."),
    (r"language_model\.encoder\.", "decoder."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    # adapters, under the names of Megatron-Bridge, whose shards and rows are the same
    (r"\.adapter_layer\.lora_kqv_adapter\.", ".linear_qkv.adapter."),
    (r"\.adapter_layer\.lora_dense_attention_adapter\.", ".linear_proj.adapter."),
    (r"\.adapter_layer\.lora_hto4h_adapter\.", ".linear_fc1.adapter."),
    (r"\.adapter_layer\.lora_4htoh_adapter\.", ".linear_fc2.adapter."),
    (r"\.adapter_layer\.lora_unfused_kqv_adapter\.([qkv])_adapter\.", r".linear_qkv.adapter.adapter_\1."),
    (r"\.adapter_layer\.lora_unfused_hto4h_adapter\.(gate|up)_adapter\.", r".linear_fc1.adapter.adapter_\1."),
)
"""NeMo's own names, and those of Megatron-Core for the same tensors, whose rows have the same order."""
_BUFFER = "inv_freq"
_CANONICAL = re.compile(r".*\.adapter\.adapter_\w+\.linear_(in|out)\.weight")


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError naming every rank that is missing."""
    iterations.refuse(path, iteration, "a checkpoint of NeMo 1")
    files = {MegatronRank(tp, pp, 0): file for tp, pp, file in nemo_files(path)}
    _check_ranks(path, files)
    contents = {rank: {"model": _under_megatrons_names(file, sources)} for rank, file in files.items()}
    facts = JoiningFacts.of_files(
        {f"mp_rank_{rank.tp:02d}_{rank.pp:03d}": each for rank, each in contents.items()}
    )
    args = recorded_args(path, sources, {})
    reader = LegacyReader(facts, {(rank.tp, 0): rank.tp for rank in files}, gated=is_gated(args))
    reader.read(contents)
    _refuse(path, reader, contents, args)
    return Checkpoint(
        path=path,
        format=NEMO,
        dialect=MEGATRON,
        tensors=reader.tensors(),
        description=ModelDescription(path, args=args),
        layout=SavedLayout.of(facts.layout),
        replicas=reader.collected.replicas,
        problems=reader.collected.copies.problems(),
        variant="Transformer Engine" if reader.fused else "local",
    )


def _check_ranks(folder: Path, files: Mapping[MegatronRank, Path]) -> None:
    tp, pp = (1 + max(each) for each in zip(*((rank.tp, rank.pp) for rank in files), strict=True))
    names = {
        MegatronRank(i, j, 0): f"tp_rank_{i:02d}_pp_rank_{j:03d}" if pp > 1 else f"mp_rank_{i:02d}"
        for i in range(tp)
        for j in range(pp)
    }
    raise_all(
        Problem(
            "nemo-rank-missing",
            "the file of a rank is missing",
            file=str(folder / name / NEMO_FILE),
            rule=f"there are {tp} tensor-parallel ranks and {pp} stages, as other folders say",
            found=f"{len(files)} files",
            remedy="copy the missing folder from where it was saved; if it is an archive, copy that again",
        )
        for rank, name in names.items()
        if rank not in files
    )


def _under_megatrons_names(file: Path, sources: Sources) -> dict[str, Any]:
    """The content of a file under the names of Megatron-Core."""
    remedy = "copy the file again from where it was saved"
    content = read_dict(file, sources, "not-nemo", "not weights of NeMo", remedy)
    names = {name: _translated(name) for name in content if isinstance(name, str)}
    return {new: content[name] for name, new in names.items() if not new.endswith(_BUFFER)}


def _translated(name: str) -> str:
    name = _WRAPPERS.sub("", name, count=1)
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _refuse(
    path: Path, reader: LegacyReader, contents: Mapping[MegatronRank, Any], args: Mapping[str, Any] | None
) -> None:
    """Raise ReshardError for ranks that do not fit together."""
    problems = reader.misfits()
    layers = (args or {}).get("num_layers")
    if len({rank.pp for rank in contents}) > 1 and isinstance(layers, int) and reader.layers != layers:
        problems.append(
            Problem(
                "nemo-layers-unnumbered",
                "the stages do not contain all layers, and layers are numbered in each stage",
                file=str(path),
                expected=f"{layers} layers, as model_config.yaml says",
                found=f"{reader.layers}, in {len({rank.pp for rank in contents})} stages",
                remedy="save the checkpoint with one stage: NeMo's megatron_change_num_partitions.py does that",
            )
        )
    canonical = [
        name for content in contents.values() for name in content["model"] if _CANONICAL.fullmatch(name)
    ]
    if canonical and len({rank.tp for rank in contents}) > 1:
        problems.append(
            Problem(
                "nemo-canonical-adapter-sharded",
                "this adapter has a pair for each projection, in shards of several ranks",
                tensor=canonical[0],
                file=str(path),
                expected="one tensor-parallel rank, or the variant nemo of lora_tuning",
                found=f"{len({rank.tp for rank in contents})} tensor-parallel ranks",
                remedy="merge it where NeMo runs, with its scripts/nlp_language_modeling/merge_lora_weights, "
                "and convert the model",
            )
        )
    raise_all(problems)
