"""Causes around files, compiled packages and optional ones: whose they are, and what was read."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import SITE, first, raised

SYMBOL = "undefined symbol: _ZN2at4_ops19empty_memory_format4callEN3c108ArrayRefINS2_6SymIntEEE"


COMPUTED = {
    f"ImportError: /opt/packages/vllm/_C.cpython-38-x86_64-linux-gnu.so: {SYMBOL}": (
        "extension-abi",
        "--force-reinstall vllm torch",
    ),
    f"ImportError: {SITE}/fused_layer_norm_cuda.cpython-310-x86_64-linux-gnu.so: {SYMBOL}": (
        "extension-abi",
        "git clone https://github.com/NVIDIA/apex",
    ),
    "    from ..._flash_attn.flash_attn_triton import (\nModuleNotFoundError: No module named 'xformers._flash_attn'": (
        "package-without-part",
        "pip uninstall -y xformers",
    ),
    raised(
        "ModuleNotFoundError: No module named 'medlib._C'",
        "from medlib._C import op",
        f"{SITE}/medlib/ops.py",
    ): (
        "package-without-part",
        "--no-cache-dir medlib",
    ),
    "OSError: Error no file named pytorch_model.bin, model.safetensors or flax_model.msgpack found in directory "
    r"D:\models\gemma-3-1b-it-q4_0-gguf.": ("artefact-mixed-up", "reshard convert"),
    "OSError: Can't load tokenizer for 'TheBloke/Llama2-13B-GGUF'. If you were trying to load it from the Hub": (
        "artefact-mixed-up",
        "reshard convert",
    ),
    "RuntimeError: Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.HalfTensor) should be the same": (
        "dtype-of-whole-numbers",
        "layer.weight",
    ),
    "ImportError: Requires Flash-Attention version >=2.7.1,<=2.7.4 but got 2.8.0.post2.": (
        "version-required",
        "--no-build-isolation 'flash-attn>=2.7.1,<=2.7.4'",
    ),
    "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: you need "
    "flash_attn package version to be greater or equal than 2.1.0. Detected version 2.0.4.": (
        "version-required",
        "'flash-attn>=2.1.0'",
    ),
    raised("KeyError: 'layers.0.mlp.down_proj.weight'", file=f"{SITE}/vllm/model_executor/models/qwen2.py"): (
        "names-engine",
        "--load-format bitsandbytes",
    ),
}


@pytest.mark.parametrize("text", COMPUTED, ids=lambda text: text[-60:])
def test_the_cause_follows_from_the_words(text: str) -> None:
    code, cure = COMPUTED[text]
    found = first(text)
    assert found.code == code
    assert cure in found.remedy.en
    for said in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", said.en + said.zh)


def test_an_installed_release_is_told_beside_the_required_one() -> None:
    found = first("ImportError: Requires Flash-Attention version >=2.7.1,<=2.7.4 but got 2.8.0.post2.")
    assert "2.8.0.post2" in found.message.en and "2.8.0.post2" in found.message.zh


OTHER = (
    # another release of a package, not an incomplete one
    (
        raised(
            "ModuleNotFoundError: No module named 'swift.megatron.model'",
            "import x",
            f"{SITE}/swift/cli/a.py",
        ),
        "package-without-part",
    ),
    # a name that a release moved
    # two parts of the user's own code
    (
        raised(
            "ImportError: cannot import name 'a' from 'helpers' (/home/user/helpers.py)",
            "from helpers import a",
        ),
        "import-of-other-release",
    ),
    # a folder whose name says nothing
    (
        "OSError: Error no file named model.safetensors found in directory /data/run/final.",
        "artefact-mixed-up",
    ),
)


@pytest.mark.parametrize(("text", "code"), OTHER)
def test_similar_words_of_other_causes_are_left_alone(text: str, code: str) -> None:
    assert first(text).code != code
