"""Formats of other tools that are declared by a table: their files, their tensor names, and how ranks cut tensors.

Each module declares which files a checkpoint has, how ranks cut its tensors, and what the Hub calls them: either as
`Renaming`s, which `formats/apply_renamings.py` applies, or as a dialect of families.
"""

from __future__ import annotations

from functools import partial

from reshard.base.later_imports import imported_later
from reshard.formats import detection, huggingface, safetensors_writers, weight_files
from reshard.formats.contract import Format

with imported_later(__name__):
    from reshard.formats.tables.deepseek import open_checkpoint as open_deepseek
    from reshard.formats.tables.litgpt import open_checkpoint as open_litgpt
    from reshard.formats.tables.meta import TARGET as META_TARGET
    from reshard.formats.tables.meta import open_checkpoint as open_meta
    from reshard.formats.tables.mistral import TARGET as MISTRAL_TARGET
    from reshard.formats.tables.mistral import open_checkpoint as open_mistral
    from reshard.formats.tables.nanotron import open_checkpoint as open_nanotron
    from reshard.formats.tables.paddle import open_checkpoint as open_paddle
    from reshard.formats.tables.vllm import open_checkpoint as open_vllm

FORMATS: tuple[Format, ...] = (
    Format(
        detection.MISTRAL,
        "consolidated.safetensors and params.json of Mistral's own code, as vLLM and mistral_inference read them",
        detection.is_mistral,
        open_mistral,
        MISTRAL_TARGET,
        aliases=("mistral-inference",),
        parts=(detection.PARAMS_FILE, detection.MISTRAL_INDEX),
        files=(detection.MISTRAL_SINGLE, detection.MISTRAL_OLD, detection.PARAMS_FILE),
        naming={detection.MISTRAL_INDEX: weight_files.shards_in},
        seen={"Mistral": r"(?:^|/)consolidated(?:-\d+-of-\d+)?\.safetensors$"},
        judged=("mistral_inference", "transformers"),
    ),
    Format(
        detection.META,
        "Meta's own Llama files, one for each rank (consolidated.*.pth)",
        detection.is_meta,
        open_meta,
        META_TARGET,
        aliases=("llama", "consolidated"),
        parts=("checklist.chk", "consolidated.*.pth"),
        files=("consolidated.00.pth", detection.PARAMS_FILE),
        judged=("llama-models",),
    ),
    Format(
        detection.LITGPT,
        "LitGPT folder (lit_model.pth and model_config.yaml)",
        detection.is_litgpt,
        open_litgpt,
        aliases=("lit-gpt",),
        instead=huggingface.NAME,
        parts=(detection.LITGPT_SETTINGS,),
        files=(detection.LITGPT_FILE, detection.LITGPT_SETTINGS),
        seen={"LitGPT": r"(?:^|/)lit_model\.pth$"},
        judged=("LitGPT",),
    ),
    Format(
        detection.NANOTRON,
        "nanotron checkpoint, a file for each parameter and rank",
        detection.is_nanotron,
        open_nanotron,
        instead=huggingface.NAME,
        judged=("nanotron",),
    ),
    Format(
        detection.DEEPSEEK,
        "files of DeepSeek's inference code, one for each rank (model*-mp*.safetensors)",
        partial(detection.all_are, detection.DEEPSEEK_RANK),
        open_deepseek,
        instead=huggingface.NAME,
        judged=("DeepSeek-V3's inference/convert.py",),
    ),
    Format(
        detection.PADDLE,
        "PaddleNLP's and PaddleFormers' own safetensors, whose linear weights are [in, out]",
        lambda path: safetensors_writers.may_have(path, *detection.PADDLE_MARKS),
        open_paddle,
        instead=huggingface.NAME,
        aliases=("paddlenlp", "paddleformers"),
        files=huggingface.FORMAT.files,
        judged=("PaddleNLP", "PaddleFormers"),
    ),
    Format(
        detection.VLLM,
        "vLLM's sharded_state, plain weights of dense models in any number of ranks",
        partial(detection.all_are, detection.VLLM_PART),
        open_vllm,
        instead=huggingface.NAME,
        aliases=("sharded-state",),
        judged=("vLLM",),
    ),
)

__all__ = ["FORMATS"]
