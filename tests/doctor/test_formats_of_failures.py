"""Classes of causes around files, compiled packages and optional ones: whose they are, and what was read."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.logs import diagnose_text

SITE = "/home/user/venv/lib/python3.11/site-packages"
SYMBOL = "undefined symbol: _ZN2at4_ops19empty_memory_format4callEN3c108ArrayRefINS2_6SymIntEEE"


def first(text: str) -> Finding:
    return diagnose_text("log", text)[0]


def raised(said: str, code: str = "f()", file: str = "/home/user/train.py", name: str = "f") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in {name}\n    {code}\n{said}'


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
    "ImportError: cannot import name 'TENorm' from 'megatron.core.extensions.transformer_engine' (/a/b.py)": (
        "name-of-optional",
        "transformer-engine[pytorch]",
    ),
    raised("KeyError: None", "kind = STATE_TYPES[state_type]"): ("key-none", "Set it"),
    raised("KeyError: 'I8'", "dtype = DTYPES[info['dtype']]"): ("key-dtype", "--dtype bfloat16"),
    raised(
        "ImportError: cannot import name 'top_k_top_p_sampling_from_probs' from 'flashinfer.sampling'",
        "from flashinfer.sampling import top_k_top_p_sampling_from_probs",
        f"{SITE}/sglang/srt/server.py",
    ): ("engine-kernels-release", "flashinfer-python"),
    "OSError: Error no file named pytorch_model.bin, model.safetensors or flax_model.msgpack found in directory "
    r"D:\models\gemma-3-1b-it-q4_0-gguf.": ("artefact-mixed-up", "reshard convert"),
    "OSError: Can't load tokenizer for 'TheBloke/Llama2-13B-GGUF'. If you were trying to load it from the Hub": (
        "artefact-mixed-up",
        "reshard convert",
    ),
    "ValidationError: 1 validation error for LlamaCpp\n__root__\n  Could not load Llama model from path: "
    "models/llama2-13b.ggmlv3.q6_K.bin. Received error": ("gguf-damaged", "convert_hf_to_gguf.py"),
    "KeyError: 'F8_E4M3'": ("key-dtype", "pip install -U safetensors"),
    raised(
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        "cuda:1! (when checking argument for argument tensors in method wrapper___cat)",
        "state_dict[name] = torch.cat(",
        "/home/user/run/zero_to_fp32.py",
    ): ("files-from-gpus", 'map_location="cpu"'),
    raised(
        "RuntimeError: Trying to resize storage that is not resizable",
        "return t.set_(storage._untyped_storage, storage_offset, size, stride)",
        f"{SITE}/torch/_utils.py",
        "_rebuild_tensor",
    ): ("storage-without-elements", "FULL_STATE_DICT"),
    "RuntimeError: Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.HalfTensor) should be the same": (
        "input-of-bytes",
        "llm_int8_skip_modules",
    ),
    "RuntimeError: Triton Error [CUDA]: device kernel image is invalid": ("driver-too-old", "nvidia-smi"),
    "_pickle.UnpicklingError: could not find MARK": ("pickle-not-of-torch", "reshard inspect"),
    "AssertionError: MolmoForCausalLM does not support LoRA yet.": (
        "not-supported-yet",
        "reshard convert ADAPTER",
    ),
    "slurmstepd: error: execve(): torchrun: No such file or directory": (
        "program-missing",
        "torch.distributed.run",
    ),
    "'sm_120' is not a recognized processor for this target (ignoring processor)\n"
    "E0305 20:23:38.890000 755 triton_heuristics.py:533] Triton compilation failed: triton_poi_fused_0": (
        "architecture-unknown",
        "whl/cu128",
    ),
    "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpd8/main.c', '-O3', '-shared', '-lcuda', '-o', "
    "'/tmp/tmpd8/triton_.so']' returned non-zero exit status 1.": ("triton-helper-failed", "libcuda.so"),
    "ImportError: Requires Flash-Attention version >=2.7.1,<=2.7.4 but got 2.8.0.post2.": (
        "version-required",
        "--no-build-isolation 'flash-attn>=2.7.1,<=2.7.4'",
    ),
    "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: you need "
    "flash_attn package version to be greater or equal than 2.1.0. Detected version 2.0.4.": (
        "version-required",
        "'flash-attn>=2.1.0'",
    ),
    "from vllm import LLM\nllm = LLM(model='unsloth/Qwen-bnb-4bit')\nKeyError: 'layers.0.mlp.down_proj.weight'": (
        "names-engine",
        "--load-format bitsandbytes",
    ),
    "`safetensors_rust.safetensorerror: error while deserializing header: headertoolarge`": (
        "safetensors-git-lfs",
        "git lfs pull",
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
    # devices of a live model, not of files
    (
        raised(
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            "cuda:1!",
            "return torch.cat([a, b])",
            f"{SITE}/transformers/models/llama/modeling_llama.py",
        ),
        "files-from-gpus",
    ),
    # samples of unequal sizes, not a file
    (
        raised(
            "RuntimeError: Trying to resize storage that is not resizable",
            "return torch.stack(batch, 0, out=out)",
            f"{SITE}/torch/utils/data/_utils/collate.py",
            "collate_tensor_fn",
        ),
        "storage-without-elements",
    ),
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
    (
        "ImportError: cannot import name 'flash_attn_func' from 'flash_attn' (/a/flash_attn/__init__.py)",
        "name-of-optional",
    ),
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
    # an ordinary key
    (raised("KeyError: 'U'", "x = letters[c]"), "key-dtype"),
)


@pytest.mark.parametrize(("text", "code"), OTHER)
def test_similar_words_of_other_causes_are_left_alone(text: str, code: str) -> None:
    assert first(text).code != code
