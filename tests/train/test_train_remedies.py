"""As `tests/bad_input/test_remedies.py`: remedies of `reshard train` and `reshard export` before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.checks.remedies import remedies
from reshard.cli import COMMANDS
from tests.bad_input.test_remedies import FLAG, follow, options_of, remedies_of
from tests.genuine.model_types import make_model_type
from tests.test_codes import ALL
from tests.train.train_remedies import CASES, STARTED

NOT_HERE = {
    "GPUs, or their number": "slurm-nodes-unused",
    "vLLM": """
        vllm-plan-unsupported vllm-server-on-same-gpus vllm-server-raw-probabilities vllm-server-unreachable
        vllm-share-too-small""",
    "other packages, or other releases of them": """
        package-version-unsupported quantized-base-sharded quantized-weights-trained
        transformers-without-tp""",
    "the ranks, which have started": """
        adapter-targets-nothing checkpoint-not-loadable data-teach-nothing
        fsdp2-head-not-averaged lora-rank-not-divisible no-step-changed-weights processes-missing
        parameters-not-as-planned rank-weights-unchanged run-unfinished trainable-parameters-differ
        trained-weight-differs""",
    "a script of the user's, under the guard": "method-experimental model-needs-transformers-4",
    "another file or model, which the remedy asks for": """
        chat-template-without-marks dataset-test-split-size file-trained-and-evaluated-on
        image-tokens-cut model-quantized transformers-cannot-build""",
}
"""What an input needs that a dry run does not have here, and the codes of such problems."""


def test_every_remedy_with_a_flag_has_a_case() -> None:
    typed = re.compile(rf"--[a-z]|reshard ({'|'.join(COMMANDS)}) |plan_instead")
    told = {
        each.code for each in ALL if each.file.startswith("training/") and typed.search(remedies_of(each))
    }
    excused = set(" ".join(NOT_HERE.values()).split())
    assert sorted(told - CASES.keys() - excused) == []
    assert sorted(excused & CASES.keys()) == [] == sorted(excused - told)


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models by name, with one that megatron-core does not compute."""
    other = tmp_path_factory.mktemp("models") / "llama4"

    def get(name: str) -> Path:
        if name == other.name and not other.exists():
            make_model_type(name, other)
        return other if name == other.name else tiny(name)

    return get


@pytest.mark.core(
    "columns-missing",
    "data-not-found",
    "output-not-empty",
    "megatron-option-unknown",
    "ranks-not-divisible",
    "lora-option-without-lora",
    "records-teach-nothing",
    "train-megatron-lacks-family",
)
@pytest.mark.parametrize("code", CASES)
def test_a_remedy_of_a_run_leads_somewhere(
    code: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STARTED.get(code, {}).items():
        monkeypatch.setenv(name, value)
    for number, case in enumerate(CASES[code]):
        follow(code, case, models, tmp_path / str(number), monkeypatch)


READ = ("algebra/", "families/", "model/", "formats/huggingface.py", "formats/operations.py")
"""What reads the model of a run: their remedies are for `convert`, whose options training lacks."""
NOT_OF_FOLDERS = """
    arguments-lack-parts config-contradicts-arguments config-differs-from-arguments family-not-found
    flat-parameters-without-shapes flat-tensor-size-differs model-part-not-kept model-type-cannot-describe
    nothing-to-quantize quantization-method-differs stacked-experts-fp8-unsupported weight-not-divisible-into-blocks"""
"""Codes of checkpoints that are no Hugging Face folder, and of options that only `convert` has."""


def test_training_has_its_own_remedy_where_convert_names_its_options() -> None:
    shared = {"--pp", "--tp", "--vpp", "--ep", "--cp", "--merge"}
    named = {
        each.code: {*FLAG.findall(remedies_of(each))} - shared for each in ALL if each.file.startswith(READ)
    }
    strange = {code for code, flags in named.items() if flags & options_of(["convert"]).keys()}
    assert sorted(strange - remedies()["train"].keys()) == sorted(NOT_OF_FOLDERS.split())
    known = options_of(["train", "sft"]).keys() | {"--engine"}
    for code, remedy in remedies()["train"].items():
        assert code in {each.code for each in ALL} and {*FLAG.findall(remedy)} <= known, code
