"""A bridge judges random models in both directions: it reads what reshard writes of them, and reshard what it writes.

    python -m tests.genuine.judge_random mcore-bridge 60 [SEED [NAME …]]      prints what came of 60 models

The names of model types are those of `model_types` and `huggingface`; without any, all that the bridge builds take
turns. The seed is that of the first turn. With KEEP=DIR in the environment, the folders stay there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import reshard
from reshard.base.errors import ReshardError
from tests.environments import python
from tests.genuine.hub_names import COPY, rewritten, rounded_bias, rounded_delta_norms, rounded_router
from tests.genuine.model_types import TYPES
from tests.genuine.peers import as_transformers_4_spells, failure_of
from tests.genuine.random_models import Bridge, Choices, RandomModel, random_model
from tests.judges import tensors_of

ROOT = Path(__file__).parent.parent.parent
Tensors = Mapping[str, torch.Tensor]


COMPRESSED: Choices = {"q_lora_rank": (16, 24)}
WITHOUT_MTP: Choices = {"num_nextn_predict_layers": (0,)}
"""For types whose MTP layers a bridge does not build."""
PADDED: Choices = {"vocab_size": (384,)}
"""For types of which Megatron-Bridge pads the vocabulary."""
ONE_SHARED: Choices = {"n_shared_experts": (1,)}

BRIDGES = {
    "mcore-bridge": Bridge(
        engine="mcore-bridge",
        module="make_mcore_bridge",
        environment="ms-swift-core-0.19",
        names=(
            *("llama", "qwen2", "qwen3", "internlm3", "ernie4_5", "glm4", "mimo", "muse_glimmer"),
            *("qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "dots1", "hy_v3", "minimax_m2", "deepseek"),
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
            *("kimi_k2", "bailing_moe", "ernie4_5_moe", "qwen3_next", "llama4"),
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "minicpmv4_6"),
            *("qwen2_5_omni", "qwen3_omni_moe", "glm4v", "glm4v_moe", "kimi_vl", "kimi_k25"),
            *("internvl", "internvl_chat", "internvl_chat_moe", "llava_onevision1_5", "ovis2_5"),
        ),
        vocabularies=(283, 288, 301),
        on_one_tensor_rank=("glm4", "glm4v"),  # it cannot save the norms after their MLPs
        options={"mimo": WITHOUT_MTP},
    ),
    "megatron-bridge": Bridge(
        engine="megatron-bridge",
        module="make_megatron_bridge",
        environment="megatron-bridge-0.6",
        names=(
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "nemotron", "mimo"),
            *("qwen3_moe", "gpt_oss", "olmoe", "hy_v3", "minimax_m2", "qwen3_next", "qwen3_5_text"),
            *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"),
            "bailing_moe",
            *("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
            *("glm4v_moe", "minimax_m3_vl", "exaone4", "ministral3", "gemma4_moe", "gemma4_sees_moe"),
        ),
        vocabularies=(288, 320),  # it does not pad them
        on_one_tensor_rank=("minimax_m2",),  # whose norms it cuts on a GPU only
        options={
            **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), COMPRESSED),
            **dict.fromkeys(("glm4_moe", "bailing_moe"), ONE_SHARED),
            **dict.fromkeys(("glm_moe_dsa", "qwen3_next"), WITHOUT_MTP),
            **dict.fromkeys(("gemma4_moe", "gemma4_sees_moe"), PADDED),
        },
        within="release",
        copies=False,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a model in one direction: "equal", "refused" by reshard, "failed" in the bridge, or "wrong"."""

    model: RandomModel
    direction: str
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.direction}: {self.model.name} {self.model.seed} {self.model.layout} {self.reason}"


def models_of(bridge: Bridge, count: int, seed: int = 0, names: Sequence[str] = ()) -> list[RandomModel]:
    """The types of models take turns; each turn has the next seed."""
    names = names or bridge.names
    turns = (divmod(number, len(names)) for number in range(count))
    return [random_model(names[at], seed + turn, bridge) for turn, at in turns]


def judged(bridge: Bridge, models: Sequence[RandomModel], folder: Path) -> list[Outcome]:
    """What comes of each model in both directions. The bridge runs once, with one process more for each rank."""
    jobs: list[str] = []
    refusals: dict[int, str] = {}
    for number, model in enumerate(models):
        place = folder / str(number)
        model.make(place / "base")
        rewritten(place / "base", rounded_router, rounded_bias, rounded_delta_norms)
        as_transformers_4_spells(place / "base")
        sizes = [str(size) for size in model.layout]
        jobs += ["save", str(place / "base"), str(place / "theirs"), *sizes, "--"]
        refusals[number] = _written(bridge, model, place)
        if (place / "ours").is_dir():
            words = ["export", str(place / "base"), str(place / "exported"), *sizes]
            jobs += [*words, str(place / "ours" / bridge.within), "--"]
    module = [python(bridge.environment), "-m", f"tests.genuine.{bridge.module}"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*module, *jobs], check=False, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log
        )
    return [
        outcome
        for number, model in enumerate(models)
        for outcome in (
            Outcome(
                model, "to the bridge", *_exported(bridge, model, folder / str(number), refusals[number])
            ),
            Outcome(model, "from the bridge", *_read(model, folder / str(number))),
        )
    ]


def _written(bridge: Bridge, model: RandomModel, place: Path) -> str:
    """Write a checkpoint for the bridge. Returns why reshard refuses to, or says that the bridge cannot load it."""
    tp, pp, ep = model.layout
    try:
        result = reshard.convert(
            place / "base", place / "ours", to="megatron", engine=bridge.engine, tp=tp, pp=pp, ep=ep, etp=1
        )
    except ReshardError as error:
        return str(error)
    return next((note for note in result.plan.notes if note.startswith("load it with")), "")


def _exported(bridge: Bridge, model: RandomModel, place: Path, refusal: str) -> tuple[str, str]:
    """The kind of outcome of what reshard wrote, and the reason."""
    if not (place / "exported").is_dir() or failure_of(place / "exported").is_file():
        return ("refused", refusal) if refusal else ("failed", _last_lines(failure_of(place / "exported")))
    found, expected = tensors_of(place / "exported"), _kept(model, place / "base")
    if model.name in TYPES and (respell := TYPES[model.name].exported):
        respell(found)
    if not bridge.copies:
        expected = {
            name: tensor for name, tensor in expected.items() if name in found or not COPY.fullmatch(name)
        }
    return _compared(found, expected)


def _read(model: RandomModel, place: Path) -> tuple[str, str]:
    """The kind of outcome of what the bridge saved, and the reason."""
    if not (place / "theirs").is_dir() or failure_of(place / "theirs").is_file():
        return "failed", _last_lines(failure_of(place / "theirs"))
    try:
        reshard.convert(place / "theirs", place / "back", base=place / "base")
    except ReshardError as error:
        return "refused", str(error)
    whole = model.name in TYPES and TYPES[model.name].from_base
    expected = tensors_of(place / "base") if whole else _kept(model, place / "base")
    return _compared(tensors_of(place / "back"), expected)


def _kept(model: RandomModel, base: Path) -> Tensors:
    lost = TYPES[model.name].lost if model.name in TYPES else ()
    return {name: tensor for name, tensor in tensors_of(base).items() if not name.startswith(lost)}


def _last_lines(file: Path) -> str:
    """The error of the rank that failed first."""
    if not file.is_file():
        return "the bridge left nothing"
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    ranks = [at for at, line in enumerate(lines) if line.startswith("rank ")]
    return " | ".join(lines[: ranks[1] if len(ranks) > 1 else None][-3:])


def _compared(found: Tensors, expected: Tensors) -> tuple[str, str]:
    """Whether they are the same tensors, bit for bit, and what differs."""
    if differing := sorted(found.keys() ^ expected.keys()):
        return "wrong", f"{len(differing)} names that one side lacks: {differing[:4]}"
    for name, tensor in expected.items():
        other = found[name]
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            return "wrong", f"{name}: {other.dtype} {list(other.shape)}, {tensor.dtype} {list(tensor.shape)}"
        if not torch.equal(other.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)):
            return "wrong", f"{name}: other values"
    return "equal", ""


def main(name: str, count: str, seed: str = "0", *names: str) -> None:
    """Print the outcomes that are not "equal", and how many there are of each kind."""
    bridge = BRIDGES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("KEEP", scratch))
        outcomes = judged(bridge, models_of(bridge, int(count), int(seed), names), folder)
    for outcome in outcomes:
        if outcome.kind != "equal":
            print(str(outcome)[:1000], "\n")
    print(*sorted(Counter((outcome.direction, outcome.kind) for outcome in outcomes).items()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
