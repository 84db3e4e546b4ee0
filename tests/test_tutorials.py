"""The commands of docs/tutorials, run one after another in a folder with the files that each page assumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard as api
from tests.commandline import reshard
from tests.test_docs import commands

PAGES = sorted(path for path in (Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
Models = Callable[..., Path]

pytestmark = pytest.mark.slow


def adapter_of(base: Path, folder: Path) -> None:
    """A LoRA adapter of PEFT on every linear layer of the attention, with values in both matrices."""
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)


@pytest.fixture
def case(hf_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A working folder with the sources of a page, under the names that the page uses."""
    monkeypatch.chdir(tmp_path)

    def prepare(page: str) -> None:
        model = Path(shutil.copytree(hf_model("qwen3", dtype="bfloat16"), "model"))
        if page in ("from-megatron", "other-layout"):
            api.convert(model, "run", to="megatron", tp=2)
            if page == "from-megatron":
                shutil.rmtree(model)
        elif page == "fsdp-and-deepspeed":
            api.convert(model, "fsdp", to="dcp")
            api.convert(model, "zero", to="deepspeed")
        elif page == "lora":
            adapter_of(model, Path("adapter"))
        elif page == "quantized":
            api.convert(model, "quantized", to="huggingface", quantize="fp8")
        elif page == "failed-run":
            Path("train.py").write_text("model = AutoModelForCausalLM.from_pretrained('m')\n")
            Path("train.log").write_text(
                'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n'
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            )

    return prepare


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_can_be_followed(page: Path, case: Callable[[str], None]) -> None:
    case(page.stem)
    for words in commands(page):
        assert words[0] == "reshard"
        done = reshard(*words[1:])
        failed = 1 if words[1] == "doctor" else 0  # a log of a failure has one
        assert done.code == failed, (words, done.err)
