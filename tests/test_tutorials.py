"""The commands of docs/tutorials, run one after another in a folder with the files that each page assumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard as api
from reshard.algebra.layout import Layout
from tests.commandline import reshard
from tests.genuine.make_fsdp_ranks import DATA
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


def trained(model: Path, run: Path) -> None:
    """A checkpoint of megatron-core at TP 2, after two steps from the weights of `model`, with its optimizer."""
    pytest.importorskip("megatron.core")
    from tests.genuine.megatron import tokens
    from tests.genuine.train_megatron import train_and_save

    api.convert(model, "start", to="megatron", tp=2, transformer_impl="local")
    args = api.open("start").checkpoint.description.args
    assert args is not None
    layout = Layout(tp=2)
    train_and_save(args, run, tokens(), checkpoint=Path("start", "release"), layout=layout, iteration=2)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, run)
    shutil.rmtree("start")


@pytest.fixture
def case(hf_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A working folder with the sources of a page, under the names that the page uses."""
    monkeypatch.chdir(tmp_path)

    def prepare(page: str) -> None:
        model = Path(shutil.copytree(hf_model("qwen3", dtype="bfloat16"), "model"))
        if page == "from-megatron":
            api.convert(model, "run", to="megatron", tp=2)
            model.rename("original")
        elif page == "other-layout":
            trained(model, Path("run"))
            shutil.rmtree(model)
        elif page == "fsdp-and-deepspeed":
            api.convert(model, "fsdp", to="dcp")
            api.convert(model, "zero", to="deepspeed")
            shutil.copytree(DATA / "verl/fsdp2", "verl")
        elif page == "lora":
            adapter_of(model, Path("adapter"))
        elif page == "quantized":
            api.convert(model, "quantized", to="huggingface", quantize="fp8")
        elif page == "fine-tune-on-megatron":
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
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
        if words[0] == "bash":  # starts ms-swift, and the commands after it need what it saves
            assert page.stem == "fine-tune-on-megatron" and Path(words[1]).is_file()
            break
        assert words[0] == "reshard"
        done = reshard(*words[1:])
        failed = 1 if words[1] == "doctor" else 0  # a log of a failure has one
        assert done.code == failed, (words, done.err)
        if "--with-optimizer" in words:
            assert reshard("inspect", words[3], "--json").json["optimizer"]
    if page.stem == "other-layout":
        kept = [words for words in commands(page) if words[1] == "convert"]
        assert all("--with-optimizer" in words for words in kept)
