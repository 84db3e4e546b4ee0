"""Messages about the files and code of certain models and quantizers, and about packages of their time."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import first

MODELS = {
    "RecursionError: maximum recursion depth exceeded while calling a Python object\nLlamaTokenizer, decapoda": (
        "llama-tokenizer-recursion",
        "huggyllama",
    ),
    "AttributeError: 'ChatGLMForConditionalGeneration' object has no attribute '_extract_past_from_model_output'": (
        "chatglm-cache",
        "transformers==4.41.2",
    ),
    "AttributeError: 'ChatGLMConfig' object has no attribute 'num_hidden_layers'": (
        "chatglm-cache",
        "4.41.2",
    ),
    '  File "/x/transformers_modules/chatglm3-6b/modeling_chatglm.py", line 413, in forward\n'
    "    cache_k, cache_v = kv_cache\nValueError: too many values to unpack (expected 2)": (
        "chatglm-cache-unpacked",
        "4.41.2",
    ),
    "AttributeError: property 'eos_token' of 'ChatGLMTokenizer' object has no setter": (
        "chatglm-token-fixed",
        "tokenizer_config.json",
    ),
    "AttributeError: can't set attribute 'pad_token'": ("chatglm-token-fixed", "tokenizer_config.json"),
    "ValueError: 130004 is not in list": ("chatglm-ids", "hf download"),
    "RuntimeError: Library cudart is not initialized": ("cpm-kernels-library", "LD_LIBRARY_PATH"),
    "ModuleNotFoundError: No module named 'llama_inference_offload'": ("gptq-for-llama-missing", "gptqmodel"),
    "NameError: name 'quant_cuda' is not defined": ("gptq-for-llama-missing", "setup_cuda.py"),
    "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n"
    "\tsize mismatch for model.layers.0.self_attn.k_proj.qzeros: copying a param with shape torch.Size([1, 512]) from "
    "checkpoint, the shape in current model is torch.Size([32, 512]).": ("gptq-layout", "--groupsize -1"),
    "TypeError: __init__() got an unexpected keyword argument 'enable_lora'": (
        "adapter-config-older",
        "sed -i",
    ),
    "ValueError: MXFP4 quantized models is only supported on GPUs with compute capability >= 9.0 (e.g H100, or B200)": (
        "mxfp4-not-native",
        "Mxfp4Config(dequantize=True)",
    ),
    "MXFP4 quantization requires triton >= 3.4.0 and kernels installed, we will default to dequantizing the model to "
    "bf16\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.98 GiB.": (
        "mxfp4-unpacked",
        "kernels",
    ),
    "OSError: decapoda-research/llama-7b-hf is not a local folder and is not a valid model identifier listed on 'https:"
    "//huggingface.co/models'": ("repository-withdrawn", "huggyllama/llama-7b"),
    "OSError: Qwen/Qwen3-8b-Chat is not a local folder and is not a valid model identifier listed on 'https://hugging"
    "face.co/models'": ("repository-not-found", "hf auth login"),
    "OSError: output/checkpoint-500 is not a local folder and is not a valid model identifier listed on 'https://hugg"
    "ingface.co/models'": ("hf-path-taken-for-repo", "ls -d"),
    "ValueError: Unrecognized configuration class <class 'transformers_modules.chatglm-6b.configuration_chatglm.ChatGLM"
    "Config'> for this kind of AutoModel: AutoModelForCausalLM.": (
        "auto-map-lacks",
        "AutoModel.from_pretrained",
    ),
    "AttributeError: 'ChatGLMModel' object has no attribute 'prefix_encoder'": (
        "chatglm-prefix",
        "pre_seq_len=128",
    ),
    '  File "/x/fastchat/train/llama_flash_attn_monkey_patch.py", line 9, in forward\n'
    "TypeError: forward() got an unexpected keyword argument 'padding_mask'": (
        "attention-patch-older",
        "train.py",
    ),
    "RuntimeError: \"triu_tril_cuda_template\" not implemented for 'BFloat16'": (
        "triangle-of-newer-torch",
        "torch>=2.1",
    ),
    "ImportError: Found an incompatible version of auto-gptq. Found version 0.4.2, but only versions above 0.4.99 are "
    "supported": ("peft-needs-newer", "auto-gptq>0.4.99"),
    "torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with fullgraph=True.": (
        "recompile-limit",
        "TORCH_COMPILE_DISABLE",
    ),
    "ValueError: Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([4096])": (
        "muon-two-dimensions",
        "p.ndim == 2",
    ),
    "torch._inductor.exc.InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: "
    "triton_tem_fused_0 Required: 163840 Hardware limit:101376 Reducing block sizes or `num_stages` may help.": (
        "short-kernel-memory",
        "sdpa",
    ),
    "ValueError: Context parallelism is supported only with SDPA attention, you are using flash_attention_2.": (
        "context-parallel-attention",
        'attn_implementation="sdpa"',
    ),
    "RuntimeError: Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
    "float and  query.dtype: c10::BFloat16 instead.": ("attention-mask-dtype", "bfloat16"),
    '  File "/x/site-packages/vllm/transformers_utils/tokenizer.py", line 96, in get_cached_tokenizer\n'
    "AttributeError: Qwen2Tokenizer has no attribute all_special_tokens_extended. 'Qwen2Tokenizer' object has no "
    "attribute 'all_special_tokens_extended'": ("engine-before-transformers-five", "transformers<5"),
    "RuntimeError: Numpy is not available": ("numpy-unavailable", "numpy<2"),
    "AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use `np.float64` instead.": (
        "numpy-two-names",
        "numpy<2",
    ),
    "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--local-rank=0']": (
        "local-rank-argument",
        "LOCAL_RANK",
    ),
    "  × No solution found when resolving dependencies:\n  ╰─▶ Because torch==2.5.1 has no wheels with a matching "
    "Python ABI tag (e.g., `cp314`) and your project depends on torch==2.5.1, we can conclude that your project's "
    "requirements are unsatisfiable.": ("wheels-of-other-python", "uv venv --python 3.12"),
    "  × No solution found when resolving dependencies for split (sys_platform == 'darwin'):\n  ╰─▶ Because "
    "triton==3.4.0 has no wheels with a matching platform tag (e.g., `macosx_14_0_arm64`) and your project depends on "
    "triton==3.4.0, we can conclude that your project's requirements are unsatisfiable.": (
        "wheels-of-other-platform",
        "sys_platform",
    ),
}


@pytest.mark.parametrize("said", MODELS, ids=lambda said: said[:60])
def test_a_message_of_its_time_is_explained(said: str) -> None:
    code, cure = MODELS[said]
    found = first(said)
    assert found.code == code
    assert cure in found.remedy.en
    for told in (found.message, found.rule, found.remedy):
        assert not re.search(r"\{[a-z]+\}", told.en + told.zh)
